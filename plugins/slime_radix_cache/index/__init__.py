"""Recorded segments, their index by text, and the contexts that a session may continue."""
