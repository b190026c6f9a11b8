"""The plugin: it authorizes requests by keys and tokens, and checks the addresses of workers."""

from __future__ import annotations

import argparse
import logging

from router_core import BadRequest, SettingsError, hookimpl
from router_core.router import Router
from router_core.types import ASGIApp
from slime_auth.access import Guard, Keys
from slime_auth.addresses import WorkerAddresses, is_loopback
from slime_auth.browsers import Pages
from slime_auth.middleware import Guarded, KeptFromPages
from slime_auth.refusals import Refusals
from slime_auth.settings import Settings, add_auth_options

__all__ = ["Auth", "add_options", "make_plugin"]

logger = logging.getLogger(__name__)


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    add_auth_options(parser)


def make_plugin(options: argparse.Namespace) -> Auth:
    """Make the plugin from the flags of the command line. Raises SettingsError."""
    return Auth(Settings.from_options(options))


class Auth:
    """Authorizes requests, and checks the addresses of workers (component ``"worker_addresses"``).

    The component ``"public_paths"`` is a set of paths that anybody may GET. A plugin adds the paths of its routes that
    show nothing secret.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._public: set[str] = set()

    @hookimpl(tryfirst=True)  # other plugins check their workers' addresses in their setup
    def setup(self, router: Router) -> None:
        core = router.settings
        addresses = WorkerAddresses.parse(self.settings.allow_worker, (core.host, core.port))
        try:
            for url in core.worker_urls:
                addresses.check(url)
        except BadRequest as error:
            raise SettingsError(f"--worker-urls: {error}") from None
        router.components.register("worker_addresses", addresses)
        router.components.register("public_paths", self._public)
        if self.settings.api_key is not None and self.settings.api_key == self.settings.admin_api_key:
            logger.warning(
                "--admin-api-key is the same key as --api-key: every client controls workers and engines"
            )
        if not self.settings.locked and not is_loopback(core.host):
            logger.warning(
                "the router listens on %s and no key is set: anybody who reaches it controls workers and engines"
                " (set --api-key or --admin-api-key)",
                core.host,
            )

    @hookimpl(trylast=True)  # inside the layers of other plugins, since these may rewrite the path
    def asgi_middleware(self, app: ASGIApp, router: Router) -> ASGIApp:
        settings, core, refusals = self.settings, router.settings, Refusals()
        if not settings.locked:
            needed = Guard(Keys(None, None), router.own_paths).needed
            app = KeptFromPages(app, Pages(needed, core.host, core.cors_allowed_origins), refusals)
        guard = settings.guard(router.own_paths, self._public)
        if guard is None:
            return app
        log = router.components.find("request_log")
        return Guarded(app, guard, refusals, log, audit=settings.control_plane.audited)
