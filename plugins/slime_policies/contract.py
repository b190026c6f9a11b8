"""The contract of every policy, as a function that tests of other packages can call, too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from router_core.exchange import Exchange
from router_core.request import Request
from router_core.workers import Worker
from slime_policies.policy import Policy, Remembering

__all__ = ["check_policy"]


def check_policy(make: Callable[[], Policy]) -> None:
    """Raise AssertionError when a policy made by ``make`` breaks the contract."""
    numbers = count()

    def ask(policy: Policy, workers: list[Worker], *, beginning: bytes = b"") -> Worker:
        """Choose a worker for a request of a new session, with a prompt that no worker has seen."""
        number = next(numbers)
        headers = [(b"content-type", b"application/json"), (b"x-session-id", b"%d" % number)]
        body = b'{"text": "%s%d, %s"}' % (beginning, number, b"and more " * 50)
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

    for _ in range(50):  # a worker that comes and goes must not count as new each time
        if isinstance(policy, Remembering):
            policy.forget(newcomer)
        ask(policy, crowd)
    assert any(ask(policy, crowd) is not newcomer for _ in range(1000)), (
        "other workers must not lose their share to a worker that comes and goes"
    )

    many = [Worker(f"http://10.0.0.1:{port}") for port in range(1, 257)]
    cold = make()
    used = {ask(cold, many).url for _ in range(1024)}
    assert len(used) > 128, f"most of 256 idle workers must be used, {len(used)} were"

    hot = make()
    system = b"You are a helpful assistant. " * 1000
    for _ in range(64):  # these requests do not end
        ask(hot, workers, beginning=system).in_flight += 1
    loads = [worker.in_flight for worker in workers]
    assert max(loads) <= 48, f"one hot prefix must not send all to one worker, got {loads}"
    for worker in workers:
        worker.in_flight = 0

    first, second = make(), make()
    for _ in range(3):
        ask(first, workers)
    assert ask(second, workers) in workers, "a second policy must work"
