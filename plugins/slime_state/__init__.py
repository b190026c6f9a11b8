"""Saves the workers and the weight versions for the next start of the router."""

from slime_state.plugin import State, add_options, make_plugin
from slime_state.snapshot import SavedWorker, Snapshot

__all__ = ["SavedWorker", "Snapshot", "State", "add_options", "make_plugin"]
