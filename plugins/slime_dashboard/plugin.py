"""The plugin: routes for the pages and for their data."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.routing import BaseRoute

from router_core import WeightUpdate, hookimpl
from router_core.flags import add_flags
from router_core.router import Router
from slime_dashboard.overview import Overview
from slime_dashboard.pages import Pages
from slime_dashboard.settings import Settings
from slime_dashboard.trajectory import TrajectoryData

__all__ = ["Dashboard", "add_options", "make_plugin"]


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, Settings)


def make_plugin(options: argparse.Namespace) -> Dashboard | None:
    """Make the plugin from the flags of the command line; None with ``--no-dashboard``. Raises SettingsError."""
    settings = Settings.from_options(options)
    return None if settings.disabled else Dashboard(settings)


class Dashboard:
    """Serves the pages, and the data that they show."""

    _overview: Overview  # from setup on
    _trajectory: TrajectoryData

    def __init__(self, settings: Settings) -> None:
        self._path = settings.path
        self._pages = Pages(settings.path)

    @hookimpl
    def setup(self, router: Router) -> None:
        self._overview = Overview(router)
        self._trajectory = TrajectoryData(router)
        router.components.register("pages", {"dashboard": self._path})  # for the banner
        public: set[str] | None = router.components.find("public_paths")
        if public is not None:
            public.update(self._pages.public_paths())

    @hookimpl
    def routes(self) -> Sequence[BaseRoute]:
        data = f"{self._path}/data"
        return [*self._pages.routes(), *self._overview.routes(data), *self._trajectory.routes(data)]

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        self._overview.begin()
        router.tasks.start_soon(self._overview.watch)
        yield

    @hookimpl
    async def on_weight_update(self, update: WeightUpdate) -> None:
        self._overview.updated(update)
