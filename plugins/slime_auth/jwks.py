"""The public keys of an identity provider, fetched when they are needed."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
import orjson

from router_core.errors import HTTPError
from slime_auth.addresses import is_loopback

__all__ = ["KeysUnavailable", "Provider", "SigningKeys", "provider_url"]

logger = logging.getLogger(__name__)

#: Keys are fetched again after an hour. If that fails, the old keys stay valid until a day after their fetch.
_FRESH_S = 3600.0
_USABLE_S = 86400.0
#: Shortest time in seconds between two fetches, since any caller can name an unknown key.
_PAUSE_S = 10.0
_DEADLINE_S = 5.0
_MAX_BYTES = 1 << 20

Jwk = dict[str, Any]


class KeysUnavailable(HTTPError):
    """The identity provider's keys were not fetched within the last day, so no token can be verified."""

    status, type, code = 503, "service_unavailable", "IDENTITY_PROVIDER_UNAVAILABLE"
    headers = ((b"retry-after", b"10"),)  # _PAUSE_S


@dataclass(frozen=True, slots=True)
class Provider:
    """An identity provider: its ``iss``, and the URL of its keys; None: the URL in its discovery document."""

    issuer: str
    jwks_uri: str | None = None


def provider_url(text: str) -> str:
    """Return ``text`` if it can be a provider's URL. Raises ValueError, whose message does not repeat ``text``."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        url = httpx.URL()
    allowed = url.scheme == "https" or (url.scheme == "http" and is_loopback(url.host))
    if not allowed or not url.host or url.userinfo:
        raise ValueError("wanted https://HOST/..., without a password in it (http:// to this machine only)")
    return text


class SigningKeys:
    """The provider's keys by their ``kid`` (JWKS, RFC 7517)."""

    def __init__(self, provider: Provider, clock: Callable[[], float] = time.monotonic) -> None:
        self._provider = provider
        self._clock = clock
        self._keys: dict[str, Jwk] = {}
        self._fetched_at = self._asked_at = -float("inf")
        self._asking = anyio.Lock()

    async def find(self, kid: str) -> Jwk | None:
        """Return the key ``kid``, or None if the keys fetched last do not include it. Raises KeysUnavailable."""
        held = kid in self._keys and self._age_s(self._fetched_at) <= _USABLE_S
        # With a valid key, do not wait for the fetch of another caller.
        if self._is_due(kid) and not (held and self._asking.locked()):
            async with self._asking:
                if self._is_due(kid):  # another caller may have fetched meanwhile
                    await self._ask()
        if self._age_s(self._fetched_at) > _USABLE_S:
            raise KeysUnavailable("the identity provider's keys cannot be fetched; the router's log says why")
        return self._keys.get(kid)

    def _is_due(self, kid: str) -> bool:
        wanted = kid not in self._keys or self._age_s(self._fetched_at) > _FRESH_S
        return wanted and self._age_s(self._asked_at) >= _PAUSE_S

    def _age_s(self, moment_s: float) -> float:
        return self._clock() - moment_s

    async def _ask(self) -> None:
        try:
            with anyio.fail_after(_DEADLINE_S):
                self._keys = await _keys_of(self._provider)
        except (httpx.HTTPError, TimeoutError, ValueError) as error:
            reason = str(error) or type(error).__name__
            logger.warning("the keys of %s cannot be fetched: %s", self._provider.issuer, reason)
        else:
            self._fetched_at = self._clock()
        finally:
            self._asked_at = self._clock()


async def _keys_of(provider: Provider) -> dict[str, Jwk]:
    """Fetch the provider's keys. Raises httpx.HTTPError and ValueError."""
    # Trusts the system's CAs, or those in SSL_CERT_FILE; --ca-cert-paths is for workers only.
    async with httpx.AsyncClient(verify=ssl.create_default_context(), trust_env=False) as client:
        uri = provider.jwks_uri
        if uri is None:
            issuer = provider.issuer.rstrip("/")
            document = await _document(client, f"{issuer}/.well-known/openid-configuration")
            if str(document.get("issuer")).rstrip("/") != issuer:
                raise ValueError("its discovery document is another issuer's")
            uri = provider_url(str(document.get("jwks_uri")))
        keys = (await _document(client, uri)).get("keys")
    if not isinstance(keys, list):
        raise ValueError("its answer has no list of keys")
    return {key["kid"]: key for key in keys if isinstance(key, dict) and isinstance(key.get("kid"), str)}


async def _document(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """Fetch the JSON object at ``url``; a redirect is an error. Raises httpx.HTTPError and ValueError."""
    body = bytearray()
    async with client.stream("GET", url, headers={"accept-encoding": "identity"}) as answer:
        if answer.status_code != 200:
            raise ValueError(f"{url} answers with {answer.status_code}")
        async for piece in answer.aiter_raw():
            body += piece
            if len(body) > _MAX_BYTES:
                raise ValueError(f"{url} answers with more than {_MAX_BYTES} bytes")
    document = orjson.loads(body)  # its error is a ValueError
    if not isinstance(document, dict):
        raise ValueError(f"{url} answers with no JSON object")
    return document
