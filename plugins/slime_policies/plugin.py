"""The plugin around a policy."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from router_core import Exchange, Worker, hookimpl
from slime_policies.cache_aware import CacheAware
from slime_policies.least_inflight import LeastInflight
from slime_policies.manual import Manual
from slime_policies.policy import Policy, Remembering
from slime_policies.power_of_two import PowerOfTwo
from slime_policies.random_choice import RandomChoice
from slime_policies.round_robin import RoundRobin
from slime_policies.settings import Settings, add_flags

__all__ = ["POLICIES", "Policies", "add_options", "make_plugin"]

POLICIES: dict[str, Callable[[Settings], Policy]] = {
    "least_inflight": lambda settings: LeastInflight(),
    "round_robin": lambda settings: RoundRobin(),
    "random": lambda settings: RandomChoice(),
    "power_of_two": lambda settings: PowerOfTwo(),
    "cache_aware": CacheAware,
    "manual": Manual,
}


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, list(POLICIES))


def make_plugin(options: argparse.Namespace) -> Policies:
    """The plugin with the policy that ``--policy`` names. Raises SettingsError."""
    settings = Settings.from_options(options)
    return Policies(POLICIES[settings.policy](settings))


class Policies:
    """Lets ``policy`` choose the worker."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @hookimpl
    def select_worker(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        return self.policy(exchange, workers)

    @hookimpl
    def worker_changed(self, worker: Worker) -> None:
        if isinstance(self.policy, Remembering):
            self.policy.forget(worker)

    @hookimpl
    async def on_weight_update(self) -> None:
        if isinstance(self.policy, Remembering):
            self.policy.forget_all()
