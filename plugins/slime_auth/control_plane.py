"""The SGLang gateway's flags for access to the control of workers and engines."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from router_core.errors import SettingsError
from slime_auth.access import ROLES, Level, NamedKey
from slime_auth.jwks import Provider, provider_url
from slime_auth.tokens import Tokens

__all__ = ["CONTROL_PLANE_OPEN", "ControlPlane", "add_control_plane_options"]


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Control plane access beside ``--admin-api-key``: named keys, an OpenID provider and the audit log.

    ``roles``: the level of each role that the ``provider`` names. ``audited``: each control call is logged.
    """

    keys: tuple[NamedKey, ...] = ()
    provider: Provider | None = None
    audience: str = ""
    roles: dict[str, Level] = field(default_factory=dict)
    audited: bool = False

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> ControlPlane:
        """Check the parsed command line. Raises SettingsError."""
        issuer: str | None = options.jwt_issuer
        audience: str | None = options.jwt_audience
        if (issuer is None) != (audience is None) or "" in (issuer, audience):
            given, missing = ("issuer", "audience") if not audience else ("audience", "issuer")
            raise SettingsError(f"--jwt-{given} is given without --jwt-{missing}; give both, neither empty")
        if issuer is None and (options.jwt_jwks_uri is not None or options.jwt_role_mapping):
            raise SettingsError("--jwt-jwks-uri and --jwt-role-mapping need --jwt-issuer")
        provider = None if issuer is None else _provider(issuer, options.jwt_jwks_uri)
        return cls(
            keys=tuple(options.control_plane_api_keys),
            provider=provider,
            audience=audience or "",
            roles=dict(options.jwt_role_mapping),
            audited=options.control_plane_audit_enabled,
        )

    @property
    def closed(self) -> bool:
        """True when a named key or a provider restricts control calls."""
        return bool(self.keys) or self.provider is not None

    def tokens(self) -> Tokens | None:
        """Return the token checker, or None without a provider. Raises SettingsError when PyJWT is missing."""
        return None if self.provider is None else Tokens(self.provider, self.audience, self.roles)


#: The settings without any of these flags.
CONTROL_PLANE_OPEN = ControlPlane()


def _provider(issuer: str, jwks_uri: str | None) -> Provider:
    # With --jwt-jwks-uri the issuer is not contacted, and may have any name.
    flag, url = ("--jwt-issuer", issuer) if jwks_uri is None else ("--jwt-jwks-uri", jwks_uri)
    try:
        provider_url(url)
    except ValueError as error:
        raise SettingsError(f"{flag}: {error}") from None
    return Provider(issuer, jwks_uri)


def _role(text: str) -> tuple[str, Level]:
    theirs, _, ours = text.partition("=")
    if not theirs or ours.lower() not in ROLES:
        raise argparse.ArgumentTypeError(f"wanted THEIRS=admin or THEIRS=user, got {text!r}")
    return theirs, ROLES[ours.lower()]


def add_control_plane_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags to ``parser``."""
    parser.add_argument(
        "--control-plane-api-keys",
        nargs="*",
        action="extend",
        type=NamedKey.parse,
        default=[],
        metavar="ID:NAME:ROLE:KEY",
        help="keys with owners and the role admin (everything) or user (traffic);"
        " set them as SLIME_ROUTER_CONTROL_PLANE_API_KEYS",
    )
    parser.add_argument(
        "--control-plane-audit-enabled", action="store_true",
        help="log a line for each call that controls workers or engines",
    )  # fmt: skip
    parser.add_argument(
        "--jwt-issuer", metavar="URL", help="OpenID provider whose tokens authenticate callers"
    )
    parser.add_argument("--jwt-audience", metavar="NAME", help="required aud claim of a token")
    parser.add_argument(
        "--jwt-jwks-uri",
        metavar="URL",
        help="URL of the provider's keys (default: from its discovery document)",
    )
    parser.add_argument(
        "--jwt-role-mapping",
        nargs="*",
        action="extend",
        type=_role,
        default=[],
        metavar="THEIRS=ROLE",
        help="the provider's roles that count as admin or user (default: the roles admin and user)",
    )
