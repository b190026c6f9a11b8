"""The contract of every policy, as a function that tests of other packages can call too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from router_core.exchange import Exchange
from router_core.request import Request
from router_core.workers import Worker
from slime_policies.policy import Policy

__all__ = ["check_policy"]


def check_policy(make: Callable[[], Policy]) -> None:
    """Raise AssertionError when a policy made by ``make`` breaks the contract."""
    numbers = count()

    def ask(policy: Policy, workers: list[Worker]) -> Worker:
        """Choose a worker for a request of a new session, with a prompt that no worker has seen."""
        number = next(numbers)
        headers = [(b"content-type", b"application/json"), (b"x-session-id", b"%d" % number)]
        body = b'{"text": "%d, %s"}' % (number, b"and more " * 50)
        return policy(Exchange(Request("POST", b"/generate", headers, body)), workers)

    workers = [Worker(f"http://127.0.0.1:{port}") for port in range(1, 5)]
    policy = make()

    alone = workers[:1]
    assert all(ask(policy, alone) is alone[0] for _ in range(3)), "the only worker must be chosen"
    bare = Exchange(Request("GET", b"/", []))
    assert policy(bare, workers) in workers, "a request without body or session must get a worker"

    counts = {worker.url: 0 for worker in workers}
    for _ in range(400):
        chosen = ask(policy, workers)
        assert chosen in workers, "the choice must be one of the workers offered"
        counts[chosen.url] += 1
    assert min(counts.values()) > 0, f"equal workers must all get their share, got {counts}"

    before = [(worker.in_flight, worker.state) for worker in workers]
    ask(policy, workers)
    assert before == [(worker.in_flight, worker.state) for worker in workers], "workers must not change"

    for gone in range(len(workers)):
        left = workers[:gone] + workers[gone + 1 :]
        assert ask(policy, left) in left, "a worker that has left must not be chosen"
    newcomer = Worker("http://127.0.0.1:9")
    crowd = [*workers, newcomer]
    assert any(ask(policy, crowd) is newcomer for _ in range(400)), "a worker that joins must get its share"

    first, second = make(), make()
    for _ in range(3):
        ask(first, workers)
    assert ask(second, workers) in workers, "a second policy must work"
