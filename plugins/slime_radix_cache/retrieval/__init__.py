"""Retrieval of exact tokens by text, by messages and by session."""
