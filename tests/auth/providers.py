"""An identity provider on a real socket, and what it signs."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import anyio
import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from slime_http.serving import serving

__all__ = ["AUDIENCE", "IdentityProvider", "SigningKey", "providing", "signing_key"]

AUDIENCE = "api://slime-router"


@dataclass(frozen=True)
class SigningKey:
    """A private key, the algorithm that it signs by, and its public half as a JWK."""

    private: Any
    algorithm: str
    public: dict[str, Any]

    def sign(self, claims: dict[str, Any], **headers: Any) -> str:
        """A token of ``claims``, whatever they are; ``headers`` go on top of the key's own, None leaves one out."""
        named = {"kid": self.public["kid"], **headers}
        given = {name: value for name, value in named.items() if value is not None}
        return jwt.PyJWS().encode(json.dumps(claims).encode(), self.private, self.algorithm, given)


@cache
def signing_key(kid: str = "one", algorithm: str = "RS256", *, bits: int = 2048) -> SigningKey:
    """A key named ``kid`` for ``algorithm``."""
    private: Any
    if algorithm[:2] in ("RS", "PS"):
        private = rsa.generate_private_key(65537, bits)
        public = RSAAlgorithm.to_jwk(private.public_key(), as_dict=True)
    elif algorithm == "EdDSA":
        private = ed25519.Ed25519PrivateKey.generate()
        public = OKPAlgorithm.to_jwk(private.public_key(), as_dict=True)
    else:
        curves = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1(), "ES512": ec.SECP521R1()}
        private = ec.generate_private_key(curves[algorithm])
        public = ECAlgorithm.to_jwk(private.public_key(), as_dict=True)
    return SigningKey(private, algorithm, {**public, "kid": kid, "use": "sig"})


@dataclass
class IdentityProvider:
    """Tells ``keys`` at ``/keys``, which its discovery document names.

    ``answers``: what it answers instead, by paths; ``held``: it answers once that is set.
    """

    url: str = ""
    keys: list[Any] = field(default_factory=lambda: [signing_key().public])
    answers: dict[str, Response] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    held: anyio.Event | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """Those of a router that trusts it."""
        return ("--jwt-issuer", self.url, "--jwt-audience", AUDIENCE)

    def claims(self, **others: Any) -> dict[str, Any]:
        """Good ones, of an admin; None for one that is to be left out."""
        now = int(time.time())
        claims = {
            "iss": self.url, "aud": AUDIENCE, "sub": "ops@example.org", "roles": ["admin"],
            "iat": now, "nbf": now, "exp": now + 600, **others,
        }  # fmt: skip
        return {name: value for name, value in claims.items() if value is not None}

    def token(self, key: SigningKey | None = None, **claims: Any) -> str:
        """One that it has signed."""
        return (key or signing_key()).sign(self.claims(**claims))

    async def answer(self, request: Request) -> Response:
        path = request.url.path
        self.asked.append(path)
        if self.held is not None:
            await self.held.wait()
        if path in self.answers:
            return self.answers[path]
        if path == "/keys":
            return JSONResponse({"keys": self.keys})
        return JSONResponse({"issuer": self.url, "jwks_uri": f"{self.url}/keys"})


@asynccontextmanager
async def providing(**options: Any) -> AsyncIterator[IdentityProvider]:
    """A provider that answers. ``options`` are those of ``serving``."""
    provider = IdentityProvider()
    app = Starlette(routes=[Route("/{path:path}", provider.answer)])
    async with serving(app, **options) as provider.url:
        yield provider
