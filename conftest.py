"""Fixtures and options of all tests: the kind of the event loop, and routers on real sockets."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import certifi
import pytest
import trustme
from hypothesis import HealthCheck, settings

from known_templates import templates_known
from own_time import OWN_TIME, Backend
from routers import Start
from slime_testing import started

# The time of an example says nothing on a busy machine. `--hypothesis-profile thorough` tries more examples.
_ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("any machine", _ANY_MACHINE, max_examples=50)
settings.register_profile("thorough", _ANY_MACHINE, max_examples=1000)
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-screenshots", action="store_true", help="write the pictures of docs/images that tests make"
    )
    parser.addoption(
        "--needs", default="", help="comma-separated modules: the run fails if one of them is missing"
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fail the run if a module of ``--needs`` cannot be imported, since nobody would see that its tests are skipped."""
    for name in filter(None, session.config.getoption("needs").split(",")):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise pytest.UsageError(f"--needs {name}: {error}") from None


@pytest.fixture(scope="session", autouse=True)
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Replace 150 public certificate authorities by one, since reading them takes 25 ms in each router and client."""
    path = str(tmp_path_factory.mktemp("authority") / "ca.pem")
    trustme.CA().cert_pem.write_to_path(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", path)
        patch.setenv("SSL_CERT_DIR", path)
        patch.setattr(certifi, "where", lambda: path)
        yield


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile a module once for all processes that tests start, even if no bytecode may be written beside its source.

    Then a router starts in half the time.
    """
    with pytest.MonkeyPatch.context() as patch:
        if sys.dont_write_bytecode:
            patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
            patch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path_factory.mktemp("bytecode")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _known_templates() -> Iterator[None]:
    """Examine each chat template once. Tests of ``openai_/prompts`` replace this fixture."""
    with templates_known():
        yield


@pytest.fixture
def anyio_backend() -> Backend:
    """A loop whose clock stands still while the machine does other work."""
    return OWN_TIME


@pytest.fixture
def start() -> Start:
    """``async with start("--plugin", ...) as running:`` serves a router on a free port, as its command line would."""

    return started
