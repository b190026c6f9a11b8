"""A fixture of all tests of prompts."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _known_templates() -> None:
    """Let each renderer examine its template, unlike in other tests."""
