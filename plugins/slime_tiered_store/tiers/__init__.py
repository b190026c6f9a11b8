"""Tiers of the store: the places that keep blocks."""
