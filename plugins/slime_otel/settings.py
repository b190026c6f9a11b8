"""The plugin's flags, and the URL of the collector."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from urllib.parse import urlsplit

from router_core.errors import SettingsError
from router_core.flags import flag, read_flags

__all__ = ["Settings"]

logger = logging.getLogger(__name__)

_PATH = "/v1/traces"
#: Ports of collectors, by convention: OTLP over gRPC, which the SGLang gateway speaks, and over HTTP.
_GRPC_PORT, _HTTP_PORT = 4317, 4318


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the plugin. ``endpoint``: as given; ``url`` is where the traces go."""

    enabled: bool = flag("--enable-trace", default=False, help="send a trace of each request to a collector")
    endpoint: str = flag(
        "--otlp-traces-endpoint", default="localhost:4317", metavar="URL",
        help="the URL or HOST:PORT of the collector; traces are sent to it by OTLP over HTTP",
    )  # fmt: skip

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        settings = read_flags(cls, options)
        if not settings.enabled and settings.endpoint != cls().endpoint:
            logger.warning("--otlp-traces-endpoint has no effect: it is for --enable-trace")
        if settings.enabled:
            settings.url  # noqa: B018  # it checks the endpoint
        return settings

    @property
    def url(self) -> str:
        """The URL for traces. Raises SettingsError.

        ``HOST:PORT`` and a URL without a path get the usual path. With ``http``, they also get port 4318 if they have
        port 4317 or no port.
        """
        given = self.endpoint
        try:
            parts = urlsplit(given if "://" in given else f"http://{given}")
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(f"--otlp-traces-endpoint: wanted HOST:PORT or http(s)://..., got {given!r}")
        if parts.path not in ("", "/"):
            return parts.geturl()
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        port = _HTTP_PORT if port in (None, _GRPC_PORT) and parts.scheme == "http" else port
        return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{_PATH}"
