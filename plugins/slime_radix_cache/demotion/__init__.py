"""Trajectories that are moved out of memory to a store, and back when they are used."""
