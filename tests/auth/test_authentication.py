"""The page's table of authentication: each kind of caller, at each kind of route, under each set of flags."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import product

import pytest

pytest.importorskip("jwt", reason="the extra jwt is not installed")

from auth.providers import IdentityProvider, providing, signing_key
from auth.surface import ADMIN, CONTROL, DATA, OPEN, OWN, TRAFFIC, status
from core.servers import Wire, answer, scripted
from routers import BARE, Start
from slime_auth.access import Level

pytestmark = pytest.mark.anyio

#: One of each kind: nothing is needed, the traffic key, the admin key for a worker's route, and for one of the core's.
ROUTES = {
    Level.OPEN: (OPEN[0],),
    Level.TRAFFIC: (DATA[0], "GET /weight_version"),
    Level.ADMIN: (CONTROL[0], "POST /generate/", OWN[0], "POST /weight_version"),
}
FLAGS = {
    "--api-key": ("--api-key", TRAFFIC),
    "--admin-api-key": ("--admin-api-key", ADMIN),
    "--control-plane-api-keys": (
        "--control-plane-api-keys",
        "bob:Bob:user:the-users-key",
        "ops:Ops:admin:the-operators-key",
    ),
    "--jwt-issuer": (),  # the provider's
}


@pytest.fixture
async def provider() -> AsyncIterator[IdentityProvider]:
    async with providing() as provider:
        yield provider


async def echo(wire: Wire) -> None:
    while request := await wire.request():
        await wire.send(answer(request.body))


@pytest.mark.parametrize("given", list(product((False, True), repeat=4))[1:], ids=str)
async def test_access_of_each_caller_to_each_route(
    given: tuple[bool, ...], start: Start, provider: IdentityProvider
) -> None:
    flags = [name for name, there in zip(FLAGS, given, strict=True) if there]
    words = [word for name in flags for word in (FLAGS[name] or provider.flags)]
    closed = flags != ["--api-key"]  # something else than the traffic key opens control
    nobody = Level.OPEN if "--api-key" in flags else Level.TRAFFIC
    #: The rights of each, and the flag without which it is nobody.
    callers: dict[str | None, tuple[Level, str]] = {
        None: (nobody, ""),
        "no key": (nobody, ""),
        TRAFFIC: (Level.TRAFFIC if closed else Level.ADMIN, "--api-key"),
        ADMIN: (Level.ADMIN, "--admin-api-key"),
        "the-users-key": (Level.TRAFFIC, "--control-plane-api-keys"),
        "the-operators-key": (Level.ADMIN, "--control-plane-api-keys"),
        provider.token(roles=["user"]): (Level.TRAFFIC, "--jwt-issuer"),
        provider.token(): (Level.ADMIN, "--jwt-issuer"),
        provider.token(exp=1): (nobody, ""),
        signing_key("another's").sign(provider.claims(), kid="one"): (nobody, ""),
    }
    async with scripted(echo) as worker, start(*BARE, *words) as running:
        await running.router.add_worker(worker.url)
        for (key, (level, flag)), needed in product(callers.items(), Level):
            known = flag in flags
            may = level if known else nobody
            for line in ROUTES[needed]:
                found = await status(running, line, key)
                if may >= needed:
                    assert found not in (401, 403), (line, key)
                else:
                    assert found == (403 if known else 401), (line, key)
        shown = [request.values(b"authorization") for request in worker.arrived]
        ours = [key for key, (_, flag) in callers.items() if key and flag in flags]
        assert not [key for key in ours for values in shown for value in values if key.encode() in value]
