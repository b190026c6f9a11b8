"""Keeps what rollouts produced in memory, on SSD and in a remote store."""
