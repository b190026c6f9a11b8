"""Types of flags whose value is a host or an origin, and the message about a text that is not a worker's URL."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from ipaddress import IPv6Address

__all__ = ["host", "origin", "wrong_worker_url"]

_MAX_SHOWN = 200


def host(text: str) -> str:
    """Return ``text``, the name or address of an interface. Raises ArgumentTypeError.

    An empty text, as from a variable without a value, is refused, since it would mean all interfaces.
    """
    if ":" in text:
        try:
            IPv6Address(text)
        except ValueError:
            raise _no_host(text) from None
    if not text or re.search(r"[\s/@\[\]]", text):
        raise _no_host(text)
    return text


def _no_host(text: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"wanted a name or an address such as 0.0.0.0, without scheme and port; got {text[:_MAX_SHOWN]!r}"
    )


def origin(text: str) -> str:
    """Return ``text``, the origin of a web page as browsers send it, or ``*``. Raises ArgumentTypeError."""
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#]+", text):
        raise ArgumentTypeError(
            f"wanted an origin such as https://app.example.com, without a path, or *; got {text[:_MAX_SHOWN]!r}"
        )
    return text


def wrong_worker_url(text: str) -> str:
    """Return a message about ``text``, which is not a worker's URL. If the meant URL is clear, the message has it."""
    shown = text[:_MAX_SHOWN]
    told = f"wanted a worker URL such as http://10.0.0.7:30001, without a path; got {shown!r}"
    if re.search(r"[\s,;\[]+.*://", text.strip()):
        return f"{told}; put spaces between several URLs, or write [URL, URL] in a file or a variable"
    meant = re.fullmatch(r"(https?://)?([A-Za-z0-9_.-]+:(\d+))([/?#].*|,)?", shown)
    if meant is not None and not 0 < int(meant[3]) < 65536:
        return f"{told}; a port is 1 to 65535"
    return f"{told}; did you mean {meant[1] or 'http://'}{meant[2]}?" if meant is not None else told
