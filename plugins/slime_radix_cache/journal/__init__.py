"""Trajectories that outlive the process."""
