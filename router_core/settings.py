"""The core's flags and their checked values."""

from __future__ import annotations

import argparse
import math
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from router_core.errors import BadRequest, SettingsError
from router_core.request_ids import add_request_id_options, request_id_headers
from router_core.serving import CLIENT_TIMEOUT_S
from router_core.workers import worker_url

__all__ = ["Secret", "Settings", "add_core_options"]

_VISIBLE = re.compile(r"[!-~]+")


class Secret(str):
    """A key; its ``repr`` does not tell it. Raises ArgumentTypeError for one that no header can carry, also untold."""

    __slots__ = ()

    def __new__(cls, text: str) -> Secret:
        if not _VISIBLE.fullmatch(text):
            raise argparse.ArgumentTypeError("wanted a key of visible ASCII characters, without spaces")
        return super().__new__(cls, text)

    def __repr__(self) -> str:
        return "Secret(...)"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the core was told. Times in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    port: int = 30000
    worker_urls: tuple[str, ...] = ()
    worker_type: Literal["regular", "passthrough"] = "regular"
    max_payload_size: int = 512 * 1024 * 1024
    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = 1800.0
    silence_timeout_s: float = 300.0
    client_timeout_s: float = CLIENT_TIMEOUT_S
    shutdown_grace_s: float = 180.0
    worker_startup_timeout_s: float = 1800.0
    worker_startup_check_s: float = 1.0
    log_level: str = "info"
    log_dir: str | None = None
    cors_allowed_origins: tuple[str, ...] = ()
    ca_cert_paths: tuple[str, ...] = ()
    client_cert_path: str | None = None
    client_key_path: str | None = None
    tls_cert_path: str | None = None
    tls_key_path: str | None = None
    worker_api_key: Secret | None = None
    request_id_headers: tuple[bytes, ...] = ()

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        try:
            urls = tuple(dict.fromkeys(worker_url(url) for url in options.worker_urls))
        except BadRequest as error:
            raise SettingsError(f"--worker-urls: {error}") from None
        settings = cls(
            host=options.host,
            port=options.port,
            worker_urls=urls,
            worker_type=options.worker_type,
            max_payload_size=options.max_payload_size,
            connect_timeout_s=options.connect_timeout_secs,
            first_byte_timeout_s=options.request_timeout_secs,
            silence_timeout_s=options.stream_silence_timeout_secs,
            client_timeout_s=options.client_timeout_secs,
            shutdown_grace_s=options.shutdown_grace_period_secs,
            worker_startup_timeout_s=options.worker_startup_timeout_secs,
            worker_startup_check_s=options.worker_startup_check_interval,
            log_level=options.log_level,
            log_dir=options.log_dir,
            cors_allowed_origins=tuple(options.cors_allowed_origins),
            ca_cert_paths=tuple(options.ca_cert_paths),
            client_cert_path=options.client_cert_path,
            client_key_path=options.client_key_path,
            tls_cert_path=options.tls_cert_path,
            tls_key_path=options.tls_key_path,
            worker_api_key=options.worker_api_key,
            request_id_headers=request_id_headers(options),
        )
        if not 0 <= settings.port <= 65535:
            raise SettingsError(f"--port: wanted 0 to 65535, got {settings.port}")
        for flag, value in (
            ("--connect-timeout-secs", settings.connect_timeout_s),
            ("--request-timeout-secs", settings.first_byte_timeout_s),
            ("--stream-silence-timeout-secs", settings.silence_timeout_s),
            ("--client-timeout-secs", settings.client_timeout_s),
            ("--shutdown-grace-period-secs", settings.shutdown_grace_s),
            ("--worker-startup-timeout-secs", settings.worker_startup_timeout_s),
            ("--worker-startup-check-interval", settings.worker_startup_check_s),
            ("--max-payload-size", settings.max_payload_size),
        ):
            if not 0 < value < math.inf:
                raise SettingsError(f"{flag}: wanted a number above 0, got {value}")
        for flag, a_path in (
            ("--client-cert-path", settings.client_cert_path),
            ("--client-key-path", settings.client_key_path),
            ("--tls-cert-path", settings.tls_cert_path),
            ("--tls-key-path", settings.tls_key_path),
            *(("--ca-cert-paths", path) for path in settings.ca_cert_paths),
        ):
            if a_path is not None and not Path(a_path).is_file():
                raise SettingsError(f"{flag}: no such file: {a_path}")
        if (settings.tls_cert_path is None) != (settings.tls_key_path is None):
            raise SettingsError("--tls-cert-path and --tls-key-path go together")
        return settings

    def worker_tls(self) -> ssl.SSLContext:
        """How https workers are checked, and how the router shows itself to them. Raises SettingsError."""
        try:
            context = ssl.create_default_context()
            for path in self.ca_cert_paths:
                context.load_verify_locations(path)
            if self.client_cert_path is not None:
                context.load_cert_chain(self.client_cert_path, self.client_key_path)
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(f"the certificates for workers cannot be used: {error}") from None
        return context


def add_core_options(parser: argparse.ArgumentParser) -> None:
    """The core's flags, spelt as the engines' own gateway spells them where it has them."""
    default = Settings()
    parser.add_argument("--host", default=default.host, help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=default.port, help="port to listen on, 0: any (default: %(default)s)"
    )
    parser.add_argument(
        "--worker-urls",
        nargs="*",
        action="extend",
        default=[],
        metavar="URL",
        help="workers to start with; more can register later",
    )
    parser.add_argument(
        "--worker-type",
        choices=["regular", "passthrough"],
        default="regular",
        help="what the workers of --worker-urls are; passthrough: servers of any kind that are only proxied to"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--worker-api-key",
        type=Secret,
        metavar="KEY",
        help="the key of workers that are registered without one; better given as SLIME_ROUTER_WORKER_API_KEY",
    )
    add_request_id_options(parser)
    parser.add_argument(
        "--max-payload-size",
        type=int,
        default=default.max_payload_size,
        metavar="BYTES",
        help="largest request body (default: %(default)s)",
    )
    parser.add_argument(
        "--connect-timeout-secs",
        type=float,
        default=default.connect_timeout_s,
        metavar="S",
        help="deadline for a connection to a worker (default: %(default)s)",
    )
    parser.add_argument(
        "--request-timeout-secs",
        type=float,
        default=default.first_byte_timeout_s,
        metavar="S",
        help="deadline for the first byte of a worker's answer (default: %(default)s)",
    )
    parser.add_argument(
        "--stream-silence-timeout-secs",
        type=float,
        default=default.silence_timeout_s,
        metavar="S",
        help="longest silence of a worker within an answer (default: %(default)s)",
    )
    parser.add_argument(
        "--client-timeout-secs",
        type=float,
        default=default.client_timeout_s,
        metavar="S",
        help="longest wait for a client to go on with its request or to take its answer (default: %(default)s)",
    )
    parser.add_argument(
        "--shutdown-grace-period-secs",
        type=float,
        default=default.shutdown_grace_s,
        metavar="S",
        help="time for requests in flight after SIGTERM (default: %(default)s)",
    )
    parser.add_argument(
        "--worker-startup-timeout-secs",
        type=float,
        default=default.worker_startup_timeout_s,
        metavar="S",
        help="how long a worker that was registered is waited for (default: %(default)s)",
    )
    parser.add_argument(
        "--worker-startup-check-interval",
        type=float,
        default=default.worker_startup_check_s,
        metavar="S",
        help="time between two looks at a worker that is waited for (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        choices=["debug", "info", "warn", "error"],
        default=default.log_level,
        help="how much to tell (default: %(default)s)",
    )
    parser.add_argument(
        "--log-dir", metavar="DIR", help="also log to slime-router.log in here, a new one each day"
    )
    parser.add_argument(
        "--cors-allowed-origins",
        nargs="*",
        action="extend",
        default=[],
        metavar="ORIGIN",
        help="sites whose pages may call the router from a browser, or * for all",
    )
    parser.add_argument(
        "--ca-cert-paths",
        "--ca-cert-path",
        nargs="*",
        action="extend",
        default=[],
        metavar="FILE",
        help="CAs of https workers",
    )
    parser.add_argument(
        "--client-cert-path", metavar="FILE", help="certificate shown to https workers (mTLS)"
    )
    parser.add_argument("--client-key-path", metavar="FILE", help="key of --client-cert-path")
    parser.add_argument("--tls-cert-path", metavar="FILE", help="serve https with this certificate")
    parser.add_argument("--tls-key-path", metavar="FILE", help="key of --tls-cert-path")
