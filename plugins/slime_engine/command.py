"""``slime-router engine``: one engine in the foreground."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from router_core.errors import SettingsError, StartupError
from slime_engine.app import make_backend_app
from slime_engine.backends import check_backend, load_backend
from slime_engine.options import add_engine_options, as_flag, settings_from
from slime_engine.settings import Settings
from slime_http.serving import bind, run, url_of
from slime_start.commands import CommandParser
from slime_start.values import host

__all__ = ["main"]

_GRACE_S = 5.0
_MAX_PORT = 65535


def _parser() -> CommandParser:
    parser = CommandParser(
        failure=SettingsError,
        prog="slime-router engine",
        description="Serve a tiny language model, or a model of transformers, with SGLang's HTTP protocol.",
    )
    parser.add_argument(
        "--host", type=host, default="127.0.0.1", help="address to listen on (default 127.0.0.1)"
    )
    parser.add_argument("--port", type=int, default=30001, help="port (default 30001; 0: any free port)")
    parser.add_argument(
        "--save-tokenizer",
        type=Path,
        metavar="DIR",
        help="write the tokenizer as Hugging Face files, for --hf-checkpoint, and exit",
    )
    add_engine_options(parser)
    return parser


def _serve(arguments: list[str]) -> None:
    options = _parser().parse_args(arguments)
    if not 0 <= options.port <= _MAX_PORT:
        raise SettingsError(f"--port: wanted 0 to {_MAX_PORT}, got {options.port}")
    try:
        settings = settings_from(options, load_in_background=True)
        check_backend(settings)
    except ValueError as error:
        raise SettingsError(as_flag(error)) from None
    if options.save_tokenizer is not None:
        return _save_tokenizer(settings, options.save_tokenizer)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        sock = bind(options.host, options.port)
    except OSError as error:
        reason = f"{error.strerror or error}; give another --port or --host"
        raise StartupError(f"cannot listen on {options.host}:{options.port}: {reason}") from None
    url = url_of(sock)

    def announce() -> None:
        sys.stdout.write(f"engine ready at {url}\n")
        sys.stdout.flush()

    app = make_backend_app(settings, lambda: load_backend(settings), announce)
    run(app, sock, grace_s=_GRACE_S)
    return None


def _save_tokenizer(settings: Settings, directory: Path) -> None:
    """Write the tokenizer of the model to ``directory``. Raises StartupError."""
    try:
        load_backend(settings).tokenizer.save(directory)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())  # errors of transformers have several lines
        raise StartupError(f"cannot save the tokenizer in {directory}: {reason}") from None


def main(argv: list[str]) -> int:
    """Run the command. Return 0 after a signal or ``--save-tokenizer``, and 2 when it cannot start or save."""
    try:
        _serve(argv)
    except StartupError as error:
        sys.stderr.write(f"slime-router engine: {error}\n")
        return 2
    return 0
