"""Authentication by JSON Web Tokens (RFC 7519) of an identity provider, checked as RFC 8725 recommends."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import orjson

from router_core.errors import SettingsError, Unauthorized
from router_core.types import Headers
from slime_auth.access import ROLES, Caller, Level
from slime_auth.jwks import Jwk, Provider, SigningKeys

__all__ = ["Tokens"]

#: Signature algorithms, each with its type of key. All are asymmetric: never ``none``, never a shared secret.
_ALGORITHMS = {
    "RS256": ("RSA", None), "RS384": ("RSA", None), "RS512": ("RSA", None),
    "PS256": ("RSA", None), "PS384": ("RSA", None), "PS512": ("RSA", None),
    "ES256": ("EC", "P-256"), "ES384": ("EC", "P-384"), "ES512": ("EC", "P-521"), "EdDSA": ("OKP", "Ed25519"),
}  # fmt: skip
#: Seconds by which clocks may differ.
_LEEWAY_S = 30
#: Claims in which providers put the roles of a caller, and the caller's name.
_ROLE_CLAIMS = ("roles", "role", "groups", "group")
_NAME_CLAIMS = ("sub", "email", "preferred_username")


class Tokens:
    """Checks tokens of ``provider`` for ``audience``.

    ``roles``: the level of each of the provider's roles; empty: the provider's roles are ``admin`` and ``user``.
    """

    def __init__(
        self,
        provider: Provider,
        audience: str,
        roles: Mapping[str, Level],
        keys: SigningKeys | None = None,
    ) -> None:
        try:
            import cryptography  # noqa: F401  # an extra; without it PyJWT supports no asymmetric keys
            import jwt  # heavy, and an extra
        except ImportError:
            raise SettingsError("--jwt-issuer needs PyJWT: pip install 'slime-router[jwt]'") from None
        self._jwt = jwt
        self._issuer = provider.issuer
        self._audience = audience
        self._roles = roles
        self._keys = keys or SigningKeys(provider)

    def take(self, headers: Headers) -> tuple[str | None, Headers]:
        """Return the token in ``headers`` that names the provider, valid or not, and headers without such tokens."""
        token = None
        rest = headers
        for pair in headers:
            if pair[0] != b"authorization":
                continue
            words = pair[1].split()
            if words and _issuer_of(words[-1]) == self._issuer:
                rest = [other for other in rest if other is not pair]
                if token is None and len(words) == 2 and words[0].lower() == b"bearer":
                    token = words[1].decode("latin-1")
        return token, rest

    async def caller(self, token: str) -> Caller:
        """Return the caller of ``token``. Raises KeysUnavailable, or Unauthorized.

        The message of Unauthorized says what is wrong, and quotes nothing from the token.
        """
        try:
            header = self._jwt.get_unverified_header(token)
        except Exception:  # a deeply nested header made PyJWT raise RecursionError
            raise _invalid_token("it cannot be read") from None
        algorithm, kid = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
            raise _invalid_token(f"wanted a signature by {', '.join(_ALGORITHMS)}")
        if not isinstance(kid, str):
            raise _invalid_token("it does not name its key (kid)")
        key = await self._keys.find(kid)
        if key is None:
            raise _invalid_token("its issuer has no such key")
        claims = self._claims(token, algorithm, key)
        names = (claims.get(claim) for claim in _NAME_CLAIMS)
        name = next((name for name in names if isinstance(name, str) and name), "unknown")
        return Caller(self._level(claims), name, "jwt")

    def _claims(self, token: str, algorithm: str, key: Jwk) -> dict[str, Any]:
        """Return the claims of ``token`` once it is verified. Raises Unauthorized."""
        jwt = self._jwt
        of_key = (key.get("kty"), key.get("crv"))
        fits = key.get("alg", algorithm) == algorithm and key.get("use", "sig") == "sig"
        if not fits or of_key != _ALGORITHMS[algorithm]:
            raise _invalid_token("its key is for another algorithm or another use")
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                jwt.PyJWK.from_dict(key, algorithm),
                algorithms=[algorithm],
                audience=self._audience,
                issuer=self._issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud"], "enforce_minimum_key_length": True},
            )
            return claims
        except jwt.ExpiredSignatureError:
            raise _invalid_token("it has expired") from None
        except jwt.ImmatureSignatureError:
            raise _invalid_token("it is not valid yet") from None
        except jwt.InvalidAudienceError:
            raise _invalid_token("it is for another audience") from None
        except jwt.MissingRequiredClaimError as error:
            raise _invalid_token(f"it has no claim {error.claim}") from None
        except Exception:
            # PyJWT's versions raise different errors for invalid keys and claims.
            raise _invalid_token("its signature or a claim is wrong, or its key cannot be used") from None

    def _level(self, claims: Mapping[str, Any]) -> Level:
        """Return the highest level of the token's roles; without a known role, the level of a user."""
        told: Any = next((claims[claim] for claim in _ROLE_CLAIMS if claim in claims), None)
        roles = [role for role in (told if isinstance(told, list) else [told]) if isinstance(role, str)]
        if self._roles:
            levels = [self._roles[role] for role in roles if role in self._roles]
        else:
            levels = [ROLES[role.lower()] for role in roles if role.lower() in ROLES]
        return max(levels, default=Level.TRAFFIC)


def _invalid_token(why: str) -> Unauthorized:
    return Unauthorized(f"invalid token: {why}")


def _issuer_of(token: bytes) -> object:
    """Return the unverified ``iss`` claim of ``token``, or None when it is no JSON Web Token."""
    parts = token.split(b".")
    if len(parts) != 3:
        return None
    try:
        claims = orjson.loads(base64.urlsafe_b64decode(parts[1] + b"=="))
    except (binascii.Error, ValueError):
        return None
    return claims.get("iss") if isinstance(claims, dict) else None
