"""Policies of other packages, by the names of their entry points."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint

from router_core import SettingsError
from slime_policies.policy import Policy
from slime_policies.settings import Settings
from slime_start.installed import entry_points

__all__ = ["GROUP", "installed_policies"]

#: An entry point of this group names a callable that makes a policy without arguments, such as the policy's class.
GROUP = "slime_router.policies"


def installed_policies() -> dict[str, Callable[[Settings], Policy]]:
    """Return, by name, a function for each installed policy. The function makes the policy, or raises SettingsError."""
    return {point.name: partial(_make, point) for point in entry_points(group=GROUP)}


def _make(point: EntryPoint, _: Settings) -> Policy:
    try:
        policy: Policy = point.load()()
    except Exception as error:  # it is another package's code
        failed = f"{type(error).__name__}: {error}"
        raise SettingsError(f"--policy {point.name}: {point.value} cannot be used ({failed})") from error
    if not callable(policy):
        raise SettingsError(f"--policy {point.name}: wanted a policy from {point.value}, got {policy!r}")
    return policy
