"""Policies of other packages, by the names of their entry points."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from functools import partial
from importlib.metadata import EntryPoint

from router_core import Exchange, SettingsError, Worker
from router_core.hooks import failure
from slime_policies.policy import Policy
from slime_policies.settings import Settings
from slime_start.installed import entry_points

__all__ = ["GROUP", "Choose", "blaming", "installed_policies", "warn_of_ignored"]

#: An entry point of this group names a callable, such as a policy's class. Called without arguments, it makes a policy.
GROUP = "slime_router.policies"

logger = logging.getLogger(__name__)

Choose = Callable[[Exchange, Sequence[Worker]], Worker]


def installed_policies() -> dict[str, Callable[[Settings], Policy]]:
    """Return, by name, a function for each installed policy. The function makes the policy, or raises SettingsError."""
    return {point.name: partial(_make, point) for point in entry_points(group=GROUP)}


def warn_of_ignored(own: Container[str]) -> None:
    """Log a warning for each installed policy that has a name in ``own``, the policies of this package."""
    for point in entry_points(group=GROUP):
        if point.name in own:
            logger.warning(
                "the policy %s = %s is ignored: slime-router has its own policy %r; rename the installed one",
                point.name, point.value, point.name,
            )  # fmt: skip


def _make(point: EntryPoint, _: Settings) -> Policy:
    try:
        policy: Policy = point.load()()
    except Exception as error:  # it is another package's code
        failed = f"{type(error).__name__}: {error}"
        raise SettingsError(f"--policy {point.name}: {point.value} cannot be used ({failed})") from error
    if not callable(policy):
        raise SettingsError(f"--policy {point.name}: wanted a policy from {point.value}, got {policy!r}")
    return policy


def blaming(policy: Policy, name: str) -> Choose:
    """Return a function that calls ``policy``. Its errors for exceptions and wrong workers show the ``name``."""
    where = f"policy {name!r}"

    def choose(exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        try:
            worker = policy(exchange, workers)
        except Exception as error:
            raise failure("policies", where, error) from error
        if worker not in workers:
            urls = ", ".join(offered.url for offered in workers)
            raise failure("policies", where, TypeError(f"wanted one of the workers {urls}, got {worker!r}"))
        return worker

    return choose
