"""The core's flags and their checked values."""

from __future__ import annotations

import argparse
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from router_core.errors import BadRequest, SettingsError
from router_core.flags import add_flags, flag, read_flags
from router_core.request_ids import DEFAULT_HEADERS, request_id_headers
from router_core.workers import worker_url
from slime_http.serving import CLIENT_TIMEOUT_S
from slime_start.certificates import cause, worker_context
from slime_start.values import host, origin

__all__ = ["Secret", "Settings", "add_core_options"]

_VISIBLE = re.compile(r"[!-~]+")


class Secret(str):
    """A key of visible ASCII characters; other texts raise ArgumentTypeError. No error or ``repr`` shows the key."""

    __slots__ = ()

    def __new__(cls, text: str) -> Secret:
        if not _VISIBLE.fullmatch(text):
            raise argparse.ArgumentTypeError("wanted a key of visible ASCII characters, without spaces")
        return super().__new__(cls, text)

    def __repr__(self) -> str:
        return "Secret(...)"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the core. Times in seconds, sizes in bytes."""

    host: str = flag("--host", default="127.0.0.1", type=host, help="address to listen on")
    port: int = flag("--port", default=30000, at_least=0, at_most=65535, help="port to listen on, 0: any")
    worker_urls: tuple[str, ...] = flag(
        "--worker-urls", default=(), nargs="*", action="extend", metavar="URL",
        help="workers to start with; more can register later",
    )  # fmt: skip
    worker_type: Literal["regular", "passthrough"] = flag(
        "--worker-type", default="regular", choices=["regular", "passthrough"],
        help="type of the workers of --worker-urls; passthrough: servers of any kind that are only proxied to",
    )  # fmt: skip
    worker_api_key: Secret | None = flag(
        "--worker-api-key", type=Secret, metavar="KEY",
        help="the key for workers that are registered without one; better set SLIME_ROUTER_WORKER_API_KEY",
    )  # fmt: skip
    max_payload_size: int = flag(
        "--max-payload-size", default=512 * 1024 * 1024, above=0, metavar="BYTES", help="largest request body"
    )
    connect_timeout_s: float = flag(
        "--connect-timeout-secs", default=5.0, above=0, metavar="S",
        help="deadline for a connection to a worker",
    )  # fmt: skip
    first_byte_timeout_s: float = flag(
        "--request-timeout-secs", default=1800.0, above=0, metavar="S",
        help="deadline for the head of a worker's answer",
    )  # fmt: skip
    silence_timeout_s: float = flag(
        "--stream-silence-timeout-secs", default=300.0, above=0, metavar="S",
        help="longest silence of a worker within an answer",
    )  # fmt: skip
    client_timeout_s: float = flag(
        "--client-timeout-secs", default=CLIENT_TIMEOUT_S, above=0, metavar="S",
        help="longest wait for a client to send more of its request, or to read more of its answer",
    )  # fmt: skip
    shutdown_grace_s: float = flag(
        "--shutdown-grace-period-secs", default=180.0, above=0, metavar="S",
        help="time for requests in flight after SIGTERM",
    )  # fmt: skip
    worker_startup_timeout_s: float = flag(
        "--worker-startup-timeout-secs", default=1800.0, above=0, metavar="S",
        help="how long a registered worker may take to answer before it is quarantined",
    )  # fmt: skip
    worker_startup_check_s: float = flag(
        "--worker-startup-check-interval", default=1.0, above=0, metavar="S",
        help="time between two checks of a registered worker that has not answered yet",
    )  # fmt: skip
    log_level: str = flag(
        "--log-level", default="info", choices=["debug", "info", "warn", "error"], help="lowest level to log"
    )
    log_dir: str | None = flag(
        "--log-dir", metavar="DIR", help="also log to DIR/slime-router.log, a new file each day"
    )
    log_retention_days: int = flag(
        "--log-retention-days", default=0, at_least=0, metavar="N",
        help="delete all but the last N files of earlier days in --log-dir; 0: delete none",
    )  # fmt: skip
    log_format: Literal["text", "json"] = flag(
        "--log-format", default="text", choices=["text", "json"], help="json: one object a line"
    )
    cors_allowed_origins: tuple[str, ...] = flag(
        "--cors-allowed-origins", type=origin, default=(), nargs="*", action="extend", metavar="ORIGIN",
        help="sites whose pages may call the router from a browser, or * for all",
    )  # fmt: skip
    ca_cert_paths: tuple[str, ...] = flag(
        "--ca-cert-paths", "--ca-cert-path", default=(), nargs="*", action="extend", metavar="FILE",
        help="CAs of https workers",
    )  # fmt: skip
    client_cert_path: str | None = flag(
        "--client-cert-path", metavar="FILE", help="certificate shown to https workers (mTLS)"
    )
    client_key_path: str | None = flag("--client-key-path", metavar="FILE", help="key of --client-cert-path")
    tls_cert_path: str | None = flag(
        "--tls-cert-path", metavar="FILE", help="serve https with this certificate"
    )
    tls_key_path: str | None = flag("--tls-key-path", metavar="FILE", help="key of --tls-cert-path")
    request_id_headers: tuple[bytes, ...] | None = flag(
        "--request-id-headers", nargs="*", metavar="NAME",
        help="give each request an id: the value of the first of these headers that it has, or a new one"
        f" (default names: {' '.join(DEFAULT_HEADERS)})",
    )  # fmt: skip

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        try:
            urls = tuple(dict.fromkeys(worker_url(url) for url in options.worker_urls))
        except BadRequest as error:
            raise SettingsError(f"--worker-urls: {error}") from None
        ids = request_id_headers(options.request_id_headers)
        settings = read_flags(cls, options, worker_urls=urls, request_id_headers=ids)
        for name, a_path in (
            ("--client-cert-path", settings.client_cert_path),
            ("--client-key-path", settings.client_key_path),
            ("--tls-cert-path", settings.tls_cert_path),
            ("--tls-key-path", settings.tls_key_path),
            *(("--ca-cert-paths", path) for path in settings.ca_cert_paths),
        ):
            if a_path is not None and not Path(a_path).is_file():
                raise SettingsError(f"{name}: no such file: {a_path}")
        if (settings.tls_cert_path is None) != (settings.tls_key_path is None):
            given, missing = ("cert", "key") if settings.tls_key_path is None else ("key", "cert")
            raise SettingsError(f"--tls-{given}-path is given without --tls-{missing}-path; give both")
        return settings

    def worker_tls(self) -> ssl.SSLContext:
        """Return the TLS context for https workers: trusted CAs, and the client certificate. Raises SettingsError."""
        try:
            return worker_context(self.ca_cert_paths, self.client_cert_path, self.client_key_path)
        except OSError as error:
            flags = "--ca-cert-paths, or --client-cert-path with --client-key-path"
            raise SettingsError(f"{flags}: {cause(error)}") from None


def add_core_options(parser: argparse.ArgumentParser) -> None:
    """Add the core's flags. Where the engines' own gateway has such a flag, the name is the same."""
    add_flags(parser, Settings)
