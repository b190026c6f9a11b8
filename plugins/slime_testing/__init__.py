"""Library for tests of plugins: a router that serves, and a fake engine with scripted answers."""

from __future__ import annotations

from slime_http.serving import serving
from slime_testing.fake_engine import FakeEngine
from slime_testing.running import Running, started

__all__ = ["FakeEngine", "Running", "serving", "started"]
