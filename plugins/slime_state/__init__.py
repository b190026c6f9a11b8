"""Keeps what clients were told of workers and weights, for the router that is started next."""

from slime_state.plugin import State, add_options, make_plugin
from slime_state.snapshot import SavedWorker, Snapshot

__all__ = ["SavedWorker", "Snapshot", "State", "add_options", "make_plugin"]
