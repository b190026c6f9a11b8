"""The plugin around a policy."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from router_core import Exchange, Worker, hookimpl
from slime_policies.least_inflight import LeastInflight
from slime_policies.policy import Policy
from slime_policies.power_of_two import PowerOfTwo
from slime_policies.random_choice import RandomChoice
from slime_policies.round_robin import RoundRobin

__all__ = ["POLICIES", "Policies", "add_options", "make_plugin"]

POLICIES: dict[str, Callable[[], Policy]] = {
    "least_inflight": LeastInflight,
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "power_of_two": PowerOfTwo,
}


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default="least_inflight",
        help="who gets a request whose session has no worker yet (default: %(default)s)",
    )


def make_plugin(options: argparse.Namespace) -> Policies:
    """The plugin with the policy that ``--policy`` names."""
    return Policies(POLICIES[options.policy]())


class Policies:
    """Lets ``policy`` choose the worker."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @hookimpl
    def select_worker(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        return self.policy(workers)
