"""A script behind each figure that the documents state; README.md says how to run them."""
