"""The plugin's flags."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from router_core import SettingsError
from router_core.flags import flag, read_flags

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Flags for fields that may name a session, although they have another purpose."""

    from_user: bool = flag(
        "--session-from-user", default=False,
        help='take "user" of the body as the name of the session, in requests that name no session otherwise',
    )  # fmt: skip
    from_api_key: bool = flag(
        "--session-from-api-key", default=False,
        help="take KEY of Authorization: Bearer KEY as the name of the session, unless it is a key of the router"
        " or of a worker, a JSON Web Token or a placeholder",
    )  # fmt: skip

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        if options.session_from_api_key and getattr(options, "api_key", None) is not None:
            raise SettingsError(
                "--session-from-api-key: with --api-key every client sends the router's own key, which names no"
                " session; give agents the base URL http://ROUTER/sessions/NAME/v1 instead"
            )
        return read_flags(cls, options)
