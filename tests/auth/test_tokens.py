"""``--jwt-issuer``: who asks is what an identity provider has signed, and nothing else; on real sockets."""

from __future__ import annotations

import base64
import builtins
import hashlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import trustme
from starlette.responses import JSONResponse, RedirectResponse, Response

pytest.importorskip("jwt", reason="the extra jwt is not installed")

from auth.providers import AUDIENCE, IdentityProvider, providing, signing_key
from core.servers import Scripted, Wire, answer, scripted
from plugged import until
from ports import free_port
from router_core.cli import build, main
from router_core.errors import SettingsError, Unauthorized
from routers import BARE, Start
from slime_auth.jwks import _PAUSE_S, KeysUnavailable, Provider, SigningKeys, provider_url
from slime_auth.tokens import Tokens
from slime_testing import Running

pytestmark = pytest.mark.anyio


async def echo(wire: Wire) -> None:
    while request := await wire.request():
        await wire.send(answer(request.body))


@pytest.fixture
async def provider() -> AsyncIterator[IdentityProvider]:
    async with providing() as provider:
        yield provider


@asynccontextmanager
async def trusting(
    start: Start, provider: IdentityProvider, *flags: str
) -> AsyncIterator[tuple[Running, Scripted]]:
    plain = (*BARE, *provider.flags, *flags)
    async with scripted(echo) as worker, start(*plain, "--worker-urls", worker.url) as running:
        yield running, worker


async def control(running: Running, token: str) -> httpx.Response:
    return await running.client.get("/workers", headers={"authorization": f"Bearer {token}"})


def why(reply: httpx.Response) -> str:
    assert reply.status_code == 401, reply.text
    return str(reply.json()["error"]["message"]).removeprefix("invalid token: ")


# authentication


@pytest.mark.parametrize(
    "algorithm",
    ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"],
)
async def test_a_token_by_each_algorithm_lets_in(
    algorithm: str, start: Start, provider: IdentityProvider
) -> None:
    key = signing_key("k", algorithm)
    provider.keys = [{"kty": "RSA"}, "no key", {**key.public, "kid": 7}, signing_key().public, key.public]
    async with trusting(start, provider) as (running, _):
        assert (await control(running, provider.token(key))).status_code == 200


@pytest.mark.parametrize(
    ("claims", "mapping", "status"),
    [
        ({"roles": ["admin"]}, (), 200),
        ({"roles": "Admin"}, (), 200),
        ({"roles": ["user", "admin"]}, (), 200),
        ({"roles": ["user"]}, (), 403),
        ({"roles": []}, (), 403),
        ({"roles": None}, (), 403),
        ({"roles": {"admin": True}}, (), 403),
        ({"roles": [["admin"], 7]}, (), 403),
        ({"roles": ["user"], "groups": ["admin"]}, (), 403),
        ({"roles": None, "role": "admin"}, (), 200),
        ({"roles": None, "groups": ["staff", "admin"]}, (), 200),
        ({"roles": None, "scope": "admin"}, (), 403),
        ({"roles": ["Gateway.Admin"]}, (), 403),
        ({"roles": ["Gateway.User", "Gateway.Admin"]}, ("Gateway.User=user", "Gateway.Admin=ADMIN"), 200),
        ({"roles": ["Gateway.User"]}, ("Gateway.User=user", "Gateway.Admin=admin"), 403),
        ({"roles": ["gateway.admin"]}, ("Gateway.Admin=admin",), 403),
        ({"roles": ["admin"]}, ("Gateway.Admin=admin",), 403),
    ],
)
async def test_the_highest_of_its_roles_counts(
    claims: dict[str, Any], mapping: tuple[str, ...], status: int, start: Start, provider: IdentityProvider
) -> None:
    flags = ("--jwt-role-mapping", *mapping) if mapping else ()
    async with trusting(start, provider, "--api-key", "traffic", *flags) as (running, worker):
        token = provider.token(**claims)
        assert (await control(running, token)).status_code == status
        spoken = await running.client.post("/generate", headers={"authorization": f"bearer  {token}"})
        assert spoken.status_code == 200  # traffic is open to users
        assert (await running.client.post("/generate")).status_code == 401
        assert [request.values(b"authorization") for request in worker.arrived] == [[]]


async def test_keys_and_tokens_stand_beside_each_other(start: Start, provider: IdentityProvider) -> None:
    keys = ("--api-key", "traffic", "--admin-api-key", "adm", "--control-plane-api-keys", "o:O:admin:ops")
    async with trusting(start, provider, *keys) as (running, _):
        for shown, status in (
            (provider.token(), 200),
            ("adm", 200),
            ("ops", 200),
            ("traffic", 403),
            ("x.y.z", 401),
        ):
            assert (await control(running, shown)).status_code == status, shown
        assert provider.asked.count("/keys") == 1


async def test_traffic_is_open_with_tokens_alone_and_workers_get_no_token(
    start: Start, provider: IdentityProvider
) -> None:
    async with trusting(start, provider) as (running, worker):
        good = provider.token()
        ours = [f"Bearer {good}", good, f"Basic {good}", f"Bearer {provider.token(exp=1)}", f"Bearer {good}x"]
        theirs = ["Bearer sk-theirs", f"Bearer {signing_key().sign({'iss': 'else'})}", "Bearer a.b.c", "a..b"]
        for value in (*ours, *theirs):
            spoken = await running.client.post("/generate", headers={"authorization": value})
            assert spoken.status_code == 200, value
        given = [request.values(b"authorization") for request in worker.arrived]
        assert given == [[]] * len(ours) + [[value.encode()] for value in theirs]
        assert provider.asked == []  # nobody wanted to know


# who does not


def segment(value: object) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


async def test_required_claims_of_a_token(start: Start, provider: IdentityProvider) -> None:
    now = int(time.time())
    cases: dict[str, dict[str, Any]] = {
        "it has expired": {"exp": now - 40},
        "it is not valid yet": {"nbf": now + 60},
        "it has no claim exp": {"exp": None},
        "it has no claim aud": {"aud": None},
        "it is for another audience": {"aud": "api://else"},
    }
    async with trusting(start, provider) as (running, _):
        for reason, claims in cases.items():
            assert why(await control(running, provider.token(**claims))) == reason
        assert why(await control(running, provider.token(aud=[f"{AUDIENCE}/x", "b"]))).startswith("it is for")
        for odd in ({"exp": "soon"}, {"exp": [1]}, {"nbf": "x"}, {"aud": 7}, {"sub": 7}, {"iat": "x"}):
            assert (await control(running, provider.token(**odd))).status_code == 401, odd
        for fine in ({"aud": ["a", AUDIENCE]}, {"exp": now - 20}, {"nbf": now + 20}, {"nbf": None}):
            assert (await control(running, provider.token(**fine))).status_code == 200, fine
        # Nobody's that we know: not looked at.
        for issuer in (None, "", f"{provider.url}/", "https://else.example", [provider.url]):
            assert why(await control(running, provider.token(iss=issuer))).startswith("wanted the router's")


async def test_a_signature_that_is_not_the_providers_lets_nobody_in(
    start: Start, provider: IdentityProvider
) -> None:
    elliptic, weak = signing_key("elliptic", "ES256"), signing_key("weak", bits=1024)
    secret = b"a secret that was put among public keys"
    oct_key = {"kty": "oct", "kid": "oct", "k": segment(secret), "alg": "HS256", "use": "sig"}
    provider.keys = [
        signing_key().public,
        elliptic.public,
        oct_key,
        weak.public,
        {**signing_key().public, "kid": "other alg", "alg": "RS512"},
        {**signing_key().public, "kid": "enc", "use": "enc"},
        {**signing_key().public, "kid": "odd", "n": "!"},
        {**signing_key().public, "kid": "bare", "n": 7},
        {"kty": "RSA", "kid": "empty"},
        {**elliptic.public, "kid": "other curve", "crv": "P-384"},
        {**elliptic.public, "kid": "off the curve", "x": elliptic.public["y"]},
    ]
    claims = provider.claims()
    body = segment(claims)
    good = provider.token()
    head, _, signature = good.split(".")

    def shared(kid: str, key: bytes, algorithm: str = "HS256") -> str:
        """Signed by a secret that both sides know."""
        signed = f"{segment({'alg': algorithm, 'kid': kid})}.{body}"
        return f"{signed}.{segment(hmac.digest(key, signed.encode(), hashlib.sha256))}"

    public = json.dumps(signing_key().public).encode()
    forged = [
        f"{segment({'alg': 'none', 'kid': 'one'})}.{body}.",
        f"{segment({'alg': 'None', 'kid': 'one'})}.{body}.",
        f"{segment({'alg': 'NONE', 'kid': 'one'})}.{body}.{signature}",
        f"{segment({'kid': 'one'})}.{body}.{signature}",
        f"{segment({'alg': None, 'kid': 'one'})}.{body}.{signature}",
        f"{segment({'alg': ['RS256'], 'kid': 'one'})}.{body}.{signature}",
        f"{segment(['RS256'])}.{body}.{signature}",
        f"{segment(b'{')}.{body}.{signature}",
        f"{segment(b'[' * 30_000)}.{body}.{signature}",
        shared("one", public),
        shared("oct", secret),
        shared("oct", secret, "RS256"),
        f"{head}.{segment({**claims, 'sub': 'root'})}.{signature}",
        f"{head}.{body}.",
        f"{head}.{body}.{signature[:-4]}",
        f"{head}.{body}.{segment(bytes(256))}",
        f"{head}.{body}.\xff",
        signing_key("not the providers").sign(claims, kid="one"),
        signing_key("not the providers").sign(claims, kid="one", jwk=signing_key("not the providers").public),
        signing_key().sign(claims, kid="odd"),
        signing_key().sign(claims, kid="bare"),
        signing_key().sign(claims, kid="empty"),
        elliptic.sign(claims, kid="other curve"),
        elliptic.sign(claims, kid="off the curve"),
        signing_key().sign(claims, kid=None),
        signing_key().sign(claims, crit=["exp"]),
        signing_key().sign(claims, crit=["b64"], b64=False),
    ]
    with pytest.warns(match="below the minimum"):
        forged.append(weak.sign(claims))
    async with trusting(start, provider) as (running, _):
        assert (await control(running, good)).status_code == 200
        for kid in ("elliptic", "other alg", "enc"):
            reply = await control(running, signing_key().sign(claims, kid=kid))
            assert why(reply) == "its key is for another algorithm or another use"
        for token in forged:
            shown = {b"authorization": b"Bearer " + token.encode("latin-1")}
            reply = await running.client.get("/workers", headers=shown)
            assert why(reply), token
            assert reply.headers["www-authenticate"] == "Bearer"


async def test_no_token_reaches_an_answer_or_the_log(
    start: Start, provider: IdentityProvider, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with trusting(start, provider, "--control-plane-audit-enabled") as (running, _):
        tokens = [provider.token(), provider.token(exp=1), provider.token(roles=[]), provider.token() + "x"]
        tokens.append(signing_key("not the providers").sign(provider.claims()))
        replies = [await control(running, token) for token in tokens]
    assert [reply.status_code for reply in replies] == [200, 401, 403, 401, 401]
    for token in tokens:
        for part in token.split("."):
            assert part not in caplog.text + "".join(reply.text for reply in replies)


# the provider's keys


async def test_new_signing_key_is_fetched_when_due_and_unknown_ones_once(
    provider: IdentityProvider,
) -> None:
    now_s = 1000.0
    keys = SigningKeys(Provider(provider.url, f"{provider.url}/keys"), lambda: now_s)
    assert await keys.find("one") == signing_key().public
    assert await keys.find("one") == signing_key().public
    assert len(provider.asked) == 1
    # A new one, before anybody may ask again, and after.
    provider.keys.append(signing_key("two").public)
    now_s += 9.9
    assert await keys.find("two") is None
    now_s += 0.1
    assert await keys.find("two") == signing_key("two").public
    assert len(provider.asked) == 2
    # Names that nobody has, from many at once.
    now_s += 10
    async with anyio.create_task_group() as tasks:
        for number in range(100):
            tasks.start_soon(keys.find, f"made up {number}")
    assert len(provider.asked) == 3
    # Known ones are asked for again after an hour; one that was taken back is then gone.
    provider.keys = [signing_key("two").public]
    now_s += 3600
    assert await keys.find("one") == signing_key().public
    now_s += 0.1
    assert await keys.find("one") is None
    assert len(provider.asked) == 4


async def test_keys_hold_for_a_day_while_the_provider_is_away(
    provider: IdentityProvider, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 1000.0
    keys = SigningKeys(Provider(provider.url, f"{provider.url}/keys"), lambda: now_s)
    assert await keys.find("one") is not None
    provider.answers["/keys"] = Response(status_code=503)
    for _ in range(23):
        now_s += 3600.1
        assert await keys.find("one") is not None
    assert (
        caplog.messages
        == [f"the keys of {provider.url} cannot be fetched: {provider.url}/keys answers with 503"] * 23
    )
    now_s += 3600.1
    with pytest.raises(KeysUnavailable):
        await keys.find("one")
    del provider.answers["/keys"]
    with pytest.raises(KeysUnavailable):
        await keys.find("one")  # asked a moment ago
    now_s += 10
    assert await keys.find("one") is not None


async def test_a_key_that_holds_waits_for_nobody_else_who_asks(provider: IdentityProvider) -> None:
    now_s = 1000.0
    keys = SigningKeys(Provider(provider.url, f"{provider.url}/keys"), lambda: now_s)
    await keys.find("one")
    provider.held = anyio.Event()
    now_s += 3600.1
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keys.find, "one")
        await until(lambda: len(provider.asked) == 2)
        with anyio.fail_after(1):
            assert await keys.find("one") == signing_key().public
        provider.held.set()


NONSENSE = {
    "no JSON": Response(b"<html>"),
    "no object": JSONResponse([]),
    "no list": JSONResponse({"keys": {}}),
    "not found": Response(status_code=404),
    "elsewhere": RedirectResponse("/keys?again"),
    "too much": Response(b" " * (1 << 20) + b'{"keys": []}'),
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
@pytest.mark.parametrize("path", ["/keys", "/.well-known/openid-configuration"])
async def test_without_its_keys_nobody_gets_in_and_it_is_nobodys_fault(
    path: str, nonsense: Response, start: Start, provider: IdentityProvider, caplog: pytest.LogCaptureFixture
) -> None:
    provider.answers[path] = nonsense
    async with trusting(start, provider) as (running, _):
        reply = await control(running, provider.token())
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "IDENTITY_PROVIDER_UNAVAILABLE"
        assert int(reply.headers["retry-after"]) >= _PAUSE_S
        assert provider.url not in reply.text
    assert f"the keys of {provider.url} cannot be fetched: " in caplog.text


@pytest.mark.parametrize(
    "document",
    [
        *({}, {"issuer": "https://else.example", "jwks_uri": "{url}/keys"}, {"jwks_uri": "{url}/keys"}),
        *({"issuer": "{url}"}, {"issuer": "{url}", "jwks_uri": "http://0.0.0.0:{port}/keys"}),
        {"issuer": "{url}", "jwks_uri": "http://a:b@127.0.0.1:{port}/keys"},
        *(
            {"issuer": "{url}", "jwks_uri": "file:///etc/passwd"},
            {"issuer": "{url}", "jwks_uri": ["{url}/keys"]},
        ),
    ],
)
async def test_a_discovery_document_that_leads_astray_is_not_followed(
    document: dict[str, Any], provider: IdentityProvider
) -> None:
    port = provider.url.rpartition(":")[2]
    told = json.dumps(document).replace("{url}", provider.url).replace("{port}", port)
    provider.answers["/.well-known/openid-configuration"] = Response(told)
    with pytest.raises(KeysUnavailable):
        await SigningKeys(Provider(provider.url)).find("one")
    assert provider.asked == ["/.well-known/openid-configuration"]


@pytest.mark.parametrize("end", ["", "/", "/realms/rl", "/realms/rl/"])
async def test_the_discovery_document_is_where_the_issuer_says(end: str, provider: IdentityProvider) -> None:
    issuer = provider.url + end
    path = f"{end.rstrip('/')}/.well-known/openid-configuration"
    provider.answers[path] = JSONResponse({"issuer": issuer, "jwks_uri": f"{provider.url}/keys"})
    assert await SigningKeys(Provider(issuer)).find("one") == signing_key().public
    assert provider.asked == [path, "/keys"]


async def test_a_provider_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(wire: Wire) -> None:
        await wire.until_closed()

    async def dripping(wire: Wire) -> None:
        await wire.request()
        with anyio.move_on_after(5):
            await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n")
            while True:
                await wire.send(b" ")
                await anyio.sleep(0.01)

    monkeypatch.setattr("slime_auth.jwks._DEADLINE_S", 0.2)
    for script in (silent, dripping):
        async with scripted(script) as served:
            with anyio.fail_after(4), pytest.raises(KeysUnavailable):
                await SigningKeys(Provider("issuer", f"{served.url}/keys")).find("one")
    with pytest.raises(KeysUnavailable):
        await SigningKeys(Provider("issuer", f"http://127.0.0.1:{free_port()}/keys")).find("one")


async def test_a_provider_behind_https_must_be_who_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "provider.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    files = {"ssl_certfile": str(tmp_path / "provider.pem"), "ssl_keyfile": str(tmp_path / "provider.pem")}
    async with providing(**files) as provider:
        url = provider.url.replace("127.0.0.1", "localhost")
        with pytest.raises(KeysUnavailable):
            await SigningKeys(Provider(url, f"{url}/keys")).find("one")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert await SigningKeys(Provider(url, f"{url}/keys")).find("one") is not None
        with pytest.raises(KeysUnavailable):  # its certificate is another name's
            await SigningKeys(Provider(url, f"{provider.url}/keys")).find("one")


async def test_waiting_for_signing_keys_delays_no_other_request(
    start: Start, provider: IdentityProvider
) -> None:
    provider.held = anyio.Event()
    statuses: list[int] = []
    async with trusting(start, provider) as (running, _), anyio.create_task_group() as tasks:

        async def ask() -> None:
            statuses.append((await control(running, provider.token())).status_code)

        for _ in range(3):
            tasks.start_soon(ask)
        await until(lambda: bool(provider.asked))
        assert (await running.client.post("/generate")).status_code == 200
        assert statuses == []
        provider.held.set()
    assert statuses == [200] * 3
    assert provider.asked.count("/keys") == 1


# the command line


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--jwt-issuer", "https://a.example"), "--jwt-issuer is given without --jwt-audience"),
        (("--jwt-audience", "a"), "--jwt-audience is given without --jwt-issuer"),
        (("--jwt-issuer", "", "--jwt-audience", ""), "neither empty"),
        (("--jwt-issuer", "", "--jwt-audience", "a"), "--jwt-audience is given without --jwt-issuer"),
        (("--jwt-issuer", "https://a.example", "--jwt-audience", ""), "without --jwt-audience"),
        (("--jwt-jwks-uri", "https://a.example"), "need --jwt-issuer"),
        (("--jwt-role-mapping", "a=admin"), "need --jwt-issuer"),
        (("--jwt-role-mapping", "a=root"), "wanted THEIRS=admin or THEIRS=user, got 'a=root'"),
        (("--jwt-role-mapping", "=admin"), "wanted THEIRS=admin"),
        (("--jwt-issuer", "http://idp.example", "--jwt-audience", "a"), "--jwt-issuer: wanted https://"),
        (
            ("--jwt-issuer", "a", "--jwt-audience", "a", "--jwt-jwks-uri", "https://a:hunter2@idp"),
            "--jwt-jwks-uri: wanted https://",
        ),
    ],
)
def test_unusable_flags_end_the_start(
    flags: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(flags)) == 2
    said = capsys.readouterr().err
    assert told in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    "url", ["https://idp.example/x", "https://10.0.0.7", "http://localhost:8080/x", "http://[::1]:1"]
)
def test_where_a_provider_may_be(url: str) -> None:
    assert provider_url(url) == url


@pytest.mark.parametrize(
    "url", ["", "idp", "//idp", "https://", "http://10.0.0.7", "https://a@b", "http://[", "file:///x"]
)
def test_where_it_may_not(url: str) -> None:
    with pytest.raises(ValueError, match="wanted https://"):
        provider_url(url)


@pytest.mark.parametrize("missing", ["jwt", "cryptography"])
def test_without_pyjwt_the_start_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == missing:
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    flags = ["--jwt-issuer", "https://idp.example", "--jwt-audience", "a"]
    with pytest.raises(SettingsError, match=r"pip install 'slime-router\[jwt\]'"):
        build(flags)
    build([])


async def test_a_token_without_a_name_is_of_somebody_unknown(provider: IdentityProvider) -> None:
    tokens = Tokens(Provider(provider.url), AUDIENCE, {})
    for claims, name in (
        ({}, "ops@example.org"),
        ({"sub": None, "email": "e@example.org"}, "e@example.org"),
        ({"sub": None, "preferred_username": "p"}, "p"),
        ({"sub": None}, "unknown"),
        ({"sub": None, "email": 7}, "unknown"),
    ):
        assert (await tokens.caller(provider.token(**claims))).name == name
    with pytest.raises(Unauthorized):
        await tokens.caller("x")
