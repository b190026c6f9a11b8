"""The plugin's flags."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from router_core import SettingsError

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Flags for fields that may name a session, although they have another purpose."""

    from_user: bool = False
    from_api_key: bool = False

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        if options.session_from_api_key and getattr(options, "api_key", None) is not None:
            raise SettingsError(
                "--session-from-api-key: with --api-key every client sends the router's own key, which names no"
                " session; give agents the base URL http://ROUTER/sessions/NAME/v1 instead"
            )
        return cls(options.session_from_user, options.session_from_api_key)
