"""The plugin: sessions by path, body and key, and the routes on them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from starlette.routing import BaseRoute

from router_core import Exchange, hookimpl
from router_core.errors import SessionNotFound
from router_core.flags import add_flags
from router_core.router import Router
from router_core.types import ASGIApp
from slime_sessions.created import CreatedSessions
from slime_sessions.paths import SessionPaths
from slime_sessions.routes import SessionRoutes
from slime_sessions.settings import Settings
from slime_sessions.sources import ApiKeySessions, from_metadata, from_user

__all__ = ["Sessions", "add_options", "make_plugin"]


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, Settings)


def make_plugin(options: argparse.Namespace) -> Sessions:
    """Make the plugin from the flags of the command line. Raises SettingsError."""
    return Sessions(Settings.from_options(options))


class Sessions:
    """Names sessions, and remembers the sessions that ``POST /sessions`` created."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._created = CreatedSessions()
        self._keys: ApiKeySessions | None = None

    @hookimpl
    def setup(self, router: Router) -> None:
        """Name sessions by the body's metadata, and by the fields that the flags allow."""
        router.session_sources.append(from_metadata)
        if self._settings.from_user:
            router.session_sources.append(from_user)
        if self._settings.from_api_key:
            self._keys = ApiKeySessions(router)
            router.session_sources.append(self._keys)

    @hookimpl
    def asgi_middleware(self, app: ASGIApp) -> ASGIApp:
        """Take sessions out of paths."""
        return SessionPaths(app)

    @hookimpl
    def routes(self, router: Router) -> Sequence[BaseRoute]:
        return SessionRoutes(router, self._created).all()

    @hookimpl
    def pre_request(self, exchange: Exchange) -> None:
        """Refuse requests of a deleted session, as nobody will fetch its samples. Remove a key that names a session."""
        deleted = self._created.deleted
        if deleted and exchange.parent is None:  # a child of an accepted request goes on
            name = exchange.session
            if name is not None and name in deleted:
                raise SessionNotFound(f"session {name!r:.200} was deleted")
        if self._keys is not None and self._keys(exchange.request) is not None:
            self._take_key(exchange)

    def _take_key(self, exchange: Exchange) -> None:
        """Remove ``Authorization``, which holds the session's name. The worker gets its own key instead, if any."""
        request = exchange.request
        session = exchange.session  # read before the key is removed; the exchange keeps it
        assert session is not None  # narrowing: the key names a session
        request.headers = [pair for pair in request.headers if pair[0] != b"authorization"]
