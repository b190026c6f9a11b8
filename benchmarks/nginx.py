"""nginx in one process: as a peer of the router, and as a worker that takes hardly any processor time."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["MISSING", "is_installed", "proxy_command", "worker_command"]

MISSING = "nginx is not installed (Debian: apt-get install nginx)"

# With `master_process off` nginx is a single process, and runs as the user who starts it.
_MAIN = """
daemon off;
master_process off;
pid {directory}/{name}.pid;
error_log stderr warn;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    default_type application/json;
    client_body_temp_path {directory}/{name}-body;
    proxy_temp_path {directory}/{name}-proxy;
    fastcgi_temp_path {directory}/{name}-fastcgi;
    uwsgi_temp_path {directory}/{name}-uwsgi;
    scgi_temp_path {directory}/{name}-scgi;
    client_body_buffer_size 128k;
    client_max_body_size 0;
    keepalive_timeout 600s;
    keepalive_requests 1000000000;
    tcp_nodelay on;
    {body}
}}
"""

# With `proxy_buffering off` bytes leave as they come, and none are written to disk. One read takes up to 128 kB, so
# that an answer of that size can leave in one write.
_PROXY = """
    upstream worker {{
        server {worker};
        keepalive 1024;
        keepalive_timeout 600s;
        keepalive_requests 1000000000;
    }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            proxy_pass http://worker;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_buffer_size 128k;
            proxy_buffers 8 128k;
            proxy_read_timeout 600s;
        }}
    }}
"""

_WORKER = """
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{ return 404 '{{}}'; }}
        location = /generate {{ return 200 '{answer}'; }}
        {facts}
    }}
"""


def is_installed() -> bool:
    return shutil.which("nginx") is not None


def proxy_command(port: int, worker_url: str, directory: Path) -> list[str]:
    """Return a command line for nginx in front of ``worker_url``, with upstream keep-alive."""
    worker = urlsplit(worker_url).netloc
    return _command(f"proxy-{port}", _PROXY.format(port=port, worker=worker), directory)


def worker_command(port: int, answer: bytes, facts: dict[str, bytes], directory: Path) -> list[str]:
    """Return a command line for nginx as a worker.

    It answers ``/generate`` with ``answer``, each path in ``facts`` with its value, and all other paths with 404.
    Raises ValueError if an answer is too long for the argument of a directive of nginx (about 4 kB), or has a
    character with a meaning there: a single quote, ``$`` or a backslash.
    """
    texts = [answer, *facts.values()]
    if any(len(text) > 4000 or b"'" in text or b"$" in text or b"\\" in text for text in texts):
        raise ValueError(
            "an answer for nginx must have at most 4000 bytes, and no single quote, dollar or backslash"
        )
    locations = "\n        ".join(
        f"location = {path} {{ return 200 '{text.decode()}'; }}" for path, text in facts.items()
    )
    body = _WORKER.format(port=port, answer=answer.decode(), facts=locations)
    return _command(f"worker-{port}", body, directory)


def _command(name: str, body: str, directory: Path) -> list[str]:
    path = directory / f"{name}.conf"
    path.write_text(_MAIN.format(name=name, directory=directory, body=body))
    return ["nginx", "-p", str(directory), "-c", str(path)]
