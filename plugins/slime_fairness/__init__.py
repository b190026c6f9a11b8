"""A library that the core uses, so that large requests do not hold up others.

Large JSON is read and written in pieces, and clients take turns with long work.
"""
