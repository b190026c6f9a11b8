"""The SGLang gateway's flags for access to the control of workers and engines."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from router_core.errors import SettingsError
from router_core.flags import flag, read_flags
from slime_auth.access import ROLES, Level, NamedKey
from slime_auth.jwks import Provider, provider_url
from slime_auth.tokens import Tokens

__all__ = ["ControlPlane"]


def _role(text: str) -> tuple[str, Level]:
    theirs, _, ours = text.partition("=")
    if not theirs or ours.lower() not in ROLES:
        raise argparse.ArgumentTypeError(f"wanted THEIRS=admin or THEIRS=user, got {text!r}")
    return theirs, ROLES[ours.lower()]


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Control plane access beside ``--admin-api-key``: named keys, an OpenID provider and the audit log.

    ``audited``: each control call is logged. ``roles``: the level of each role that the provider names.
    """

    keys: tuple[NamedKey, ...] = flag(
        "--control-plane-api-keys", default=(), nargs="*", action="extend", type=NamedKey.parse,
        metavar="ID:NAME:ROLE:KEY",
        help="keys with owners and the role admin (everything) or user (traffic);"
        " set them as SLIME_ROUTER_CONTROL_PLANE_API_KEYS",
    )  # fmt: skip
    audited: bool = flag(
        "--control-plane-audit-enabled", default=False,
        help="log a line for each call that controls workers or engines",
    )  # fmt: skip
    issuer: str | None = flag(
        "--jwt-issuer", metavar="URL", help="OpenID provider whose tokens authenticate callers"
    )
    audience: str | None = flag("--jwt-audience", metavar="NAME", help="required aud claim of a token")
    jwks_uri: str | None = flag(
        "--jwt-jwks-uri", metavar="URL",
        help="URL of the provider's keys (default: from its discovery document)",
    )  # fmt: skip
    roles: tuple[tuple[str, Level], ...] = flag(
        "--jwt-role-mapping", default=(), nargs="*", action="extend", type=_role, metavar="THEIRS=ROLE",
        help="the provider's roles that count as admin or user (default: the roles admin and user)",
    )  # fmt: skip

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> ControlPlane:
        """Check the parsed command line. Raises SettingsError."""
        made = read_flags(cls, options)
        issuer, audience = made.issuer, made.audience
        if (issuer is None) != (audience is None) or "" in (issuer, audience):
            given, missing = ("issuer", "audience") if not audience else ("audience", "issuer")
            raise SettingsError(f"--jwt-{given} is given without --jwt-{missing}; give both, neither empty")
        if issuer is None and (made.jwks_uri is not None or made.roles):
            raise SettingsError("--jwt-jwks-uri and --jwt-role-mapping need --jwt-issuer")
        if issuer is not None:
            # With --jwt-jwks-uri the issuer is not contacted, and may have any name.
            which, url = ("issuer", issuer) if made.jwks_uri is None else ("jwks-uri", made.jwks_uri)
            try:
                provider_url(url)
            except ValueError as error:
                raise SettingsError(f"--jwt-{which}: {error}") from None
        return made

    @property
    def closed(self) -> bool:
        """True when a named key or a provider restricts control calls."""
        return bool(self.keys) or self.issuer is not None

    def tokens(self) -> Tokens | None:
        """Return the token checker, or None without a provider. Raises SettingsError when PyJWT is missing."""
        if self.issuer is None:
            return None
        return Tokens(Provider(self.issuer, self.jwks_uri), self.audience or "", dict(self.roles))
