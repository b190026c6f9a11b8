"""The plugin: routes for the pages and for their data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from router_core import hookimpl
from router_core.router import Router
from router_core.routes import JSON, ControlRoute
from slime_dashboard.fleet import fleet
from slime_dashboard.pages import Pages
from slime_dashboard.settings import Settings, add_dashboard_options

__all__ = ["Dashboard", "add_options", "make_plugin"]


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    add_dashboard_options(parser)


def make_plugin(options: argparse.Namespace) -> Dashboard | None:
    """Make the plugin from the flags of the command line; None with ``--no-dashboard``. Raises SettingsError."""
    settings = Settings.from_options(options)
    return None if options.no_dashboard else Dashboard(settings)


class Dashboard:
    """Serves the pages, and the data that they show."""

    def __init__(self, settings: Settings) -> None:
        self._path = settings.path
        self._pages = Pages(settings.path)

    @hookimpl
    def setup(self, router: Router) -> None:
        self._router = router
        router.components.register("pages", {"dashboard": self._path})  # for the banner
        public: set[str] | None = router.components.find("public_paths")
        if public is not None:
            public.update(self._pages.public_paths())

    @hookimpl
    def routes(self) -> Sequence[BaseRoute]:
        data = f"{self._path}/data"
        return [*self._pages.routes(), ControlRoute(f"{data}/overview", self._overview, methods=["GET"])]

    async def _overview(self, _: Request) -> Response:
        return JSON({"fleet": fleet(self._router)}, headers={"cache-control": "no-store"})
