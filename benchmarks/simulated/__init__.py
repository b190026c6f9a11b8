"""A discrete-event simulation of engines with KV caches, and the workloads for it."""
