"""The structures of what is recorded: segments, the index by text, and the contexts that a session may take."""
