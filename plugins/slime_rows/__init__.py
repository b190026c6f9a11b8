"""A library for plugins: answers with rows, which are read from memory or a store while they are sent.

A row has the values of one token, such as its routed experts.
"""
