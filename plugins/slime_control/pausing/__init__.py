"""Pauses and aborts."""
