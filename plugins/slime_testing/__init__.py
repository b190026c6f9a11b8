"""Library for tests of plugins: a router that serves, and a fake engine with scripted answers."""

from __future__ import annotations

from slime_http.serving import serving
from slime_testing.fake_engine import Call, FakeEngine
from slime_testing.running import Running, started

__all__ = ["Call", "FakeEngine", "Running", "serving", "started"]
