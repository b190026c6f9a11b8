"""Exact tokens by text, by messages and by session."""
