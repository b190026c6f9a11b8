"""Conversations that go on from the tokens of their former turns."""
