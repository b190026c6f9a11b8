"""``--control-plane-api-keys``: keys with owners and roles, beside the router's own."""

from __future__ import annotations

import argparse
import hmac
import logging

import pytest

from core.servers import Wire, answer, scripted
from router_core.cli import build, main
from router_core.settings import Secret
from routers import BARE, Start
from slime_auth.access import Caller, Keys, Level, NamedKey
from slime_testing import Running

pytestmark = pytest.mark.anyio

OPS, BOB, TRAFFIC, ADMIN = "ops-key:with-colons", "bobs-key-0123456789", "traffic-key-0123", "admin-key-0123"
NAMED = ("--control-plane-api-keys", f"ops:Service Account:admin:{OPS}", f"bob:Bob:User:{BOB}")


async def echo(wire: Wire) -> None:
    while request := await wire.request():
        await wire.send(answer(request.body))


async def statuses(running: Running, key: str | None) -> list[int]:
    """Of traffic, of a control call, and of one of the core's own."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    asked = [("POST", "/generate"), ("POST", "/update_weights_from_disk"), ("GET", "/workers")]
    answers = [await running.client.request(*line, headers=headers) for line in asked]
    return [reply.status_code for reply in answers]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), {None: [200, 401, 401], OPS: [200] * 3, BOB: [200, 403, 403], "wrong": [200, 401, 401]}),
        (
            ("--api-key", TRAFFIC),
            {
                None: [401] * 3,
                TRAFFIC: [200, 403, 403],
                OPS: [200] * 3,
                BOB: [200, 403, 403],
                "wrong": [401] * 3,
                "ops": [401] * 3,
                OPS[:-1]: [401] * 3,
            },
        ),
        (("--admin-api-key", ADMIN), {None: [200, 401, 401], ADMIN: [200] * 3, OPS: [200] * 3}),
    ],
)
async def test_a_role_opens_what_it_says(
    flags: tuple[str, ...], expected: dict[str | None, list[int]], start: Start
) -> None:
    async with (
        scripted(echo) as worker,
        start(*BARE, *NAMED, *flags, "--worker-urls", worker.url) as running,
    ):
        for key, told in expected.items():
            assert await statuses(running, key) == told, key


async def test_with_users_only_nobody_controls(start: Start) -> None:
    flags = ("--api-key", TRAFFIC, "--control-plane-api-keys", f"bob:Bob:user:{BOB}")
    async with scripted(echo) as worker, start(*flags, "--worker-urls", worker.url) as running:
        assert await statuses(running, BOB) == [200, 403, 403]
        assert await statuses(running, TRAFFIC) == [200, 403, 403]


async def test_no_named_key_reaches_a_worker_or_the_log(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    flags = (*BARE, *NAMED, "--control-plane-audit-enabled")
    async with scripted(echo) as worker, start(*flags, "--worker-urls", worker.url) as running:
        for key in (OPS, BOB):
            for value in (f"Bearer {key}", f"Basic {key}", key):
                for path in ("/generate", "/flush_cache", "/workers"):
                    await running.client.get(path, headers={"authorization": value})
        router = running.router
        told = repr((router.settings, router.options, vars(router.options)))
        assert [request.values(b"authorization") for request in worker.arrived] == [[]] * 7
    assert "'ops'" in told
    for key in (OPS, BOB):
        assert key not in told
        assert key not in caplog.text


def test_every_named_key_is_compared_whichever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    real = hmac.compare_digest

    def watched(token: bytes, key: bytes) -> bool:
        compared.append(key)
        return real(token, key)

    monkeypatch.setattr("slime_auth.access.hmac.compare_digest", watched)
    named = [NamedKey.parse(text) for text in NAMED[1:]]
    keys = Keys(Secret(TRAFFIC), Secret(ADMIN), named)
    for shown in (OPS, BOB, TRAFFIC, ADMIN, "wrong"):
        compared.clear()
        keys.authenticate([(b"authorization", b"Bearer " + shown.encode())])
        assert compared[:4] == [key.encode() for key in (OPS, BOB, TRAFFIC, ADMIN)]


def test_of_several_keys_the_one_that_opens_most_counts() -> None:
    keys = Keys(Secret("same"), None, [NamedKey.parse("a:A:user:same"), NamedKey.parse("b:B:admin:same")])
    assert keys.authenticate([(b"authorization", b"Bearer same")])[0] == Caller(Level.ADMIN, "b", "api_key")


@pytest.mark.parametrize(
    "text",
    [
        *("hunter2", "id:name:hunter2", "id:name:root:hunter2", ":name:admin:hunter2", "id:name:admin:"),
        *("id:name:admin: hunter2", "id:name:admin:hunter2\n", "id:name::hunter2", ""),
    ],
)
def test_a_key_that_cannot_be_is_refused_untold(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        NamedKey.parse(text)
    assert main(["--control-plane-api-keys", text]) == 2
    told = capsys.readouterr().err
    assert told.startswith("slime-router: --control-plane-api-keys: wanted ")
    assert "hunter2" not in told


def test_named_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_ROUTER_CONTROL_PLANE_API_KEYS", "[a:Service Account:admin:one, b:B:user:two]")
    keys = build([])[0].options.control_plane_api_keys
    assert keys == [
        NamedKey(Caller(Level.ADMIN, "a", "api_key"), Secret("one")),
        NamedKey(Caller(Level.TRAFFIC, "b", "api_key"), Secret("two")),
    ]
