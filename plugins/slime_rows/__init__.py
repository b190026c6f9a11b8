"""A library for plugins: answers with rows of tokens, such as routed experts. Rows are read while they are sent."""
