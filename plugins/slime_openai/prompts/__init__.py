"""Conversations, continued from the tokens of their earlier turns."""
