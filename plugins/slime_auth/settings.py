"""Flags for authentication, and for the addresses that workers may have."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from router_core.flags import add_flags, flag, read_flags
from router_core.settings import Secret
from slime_auth.access import Guard, Keys
from slime_auth.control_plane import ControlPlane

__all__ = ["Settings", "add_auth_options"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings from the command line. ``allow_worker``: patterns of :class:`slime_auth.addresses.WorkerAddresses`."""

    allow_worker: tuple[str, ...] = flag(
        "--allow-worker", default=(), nargs="+", action="extend", metavar="PATTERN",
        help="allow only these workers: [scheme://]host[:port]; host is a name (with * and ?), address or network",
    )  # fmt: skip
    api_key: Secret | None = flag(
        "--api-key", type=Secret, metavar="KEY",
        help="key for traffic; set it as SLIME_ROUTER_API_KEY, since ps shows command lines",
    )  # fmt: skip
    admin_api_key: Secret | None = flag(
        "--admin-api-key", type=Secret, metavar="KEY",
        help="key for calls that control workers or engines; set it as SLIME_ROUTER_ADMIN_API_KEY",
    )  # fmt: skip
    control_plane: ControlPlane = field(default_factory=ControlPlane)

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        return read_flags(cls, options, control_plane=ControlPlane.from_options(options))

    @property
    def locked(self) -> bool:
        """True when anything needs a key or a token."""
        return self.api_key is not None or self.admin_api_key is not None or self.control_plane.closed

    def guard(self, own: Iterable[tuple[re.Pattern[str], bool]], public: Collection[str]) -> Guard | None:
        """Return the guard of all requests, or None when no key, provider or audit log is set. Arguments: see Guard.

        Raises SettingsError.
        """
        control = self.control_plane
        if not self.locked and not control.audited:
            return None
        keys = Keys(self.api_key, self.admin_api_key, control.keys, closed=control.issuer is not None)
        return Guard(keys, own, control.tokens(), public)


def add_auth_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags to ``parser``. The SGLang gateway's flags keep their names."""
    add_flags(parser, Settings)
    add_flags(parser, ControlPlane)
