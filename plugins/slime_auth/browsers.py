"""Protection of a router without keys from the web pages of other sites.

A page of any site can send requests to 127.0.0.1 without reading the answers (an image, a form, ``fetch`` with
``no-cors``). Control calls of such a page are refused; its generations are not. The page can read the answers if the
site's own name resolves to 127.0.0.1 (DNS rebinding). So a router on loopback refuses a ``Host`` that may be
the name of another site.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from router_core.errors import Forbidden, HTTPError
from router_core.types import Scope
from slime_auth.access import Level
from slime_auth.addresses import is_loopback
from slime_auth.errors import UnsupportedMediaType

__all__ = ["Pages"]

#: Values of ``Sec-Fetch-Site`` in requests that do not come from another site; empty: there is no such header.
_OWN_SITES = (b"", b"none", b"same-origin")
#: The largest number of accepted values of ``Host`` in the cache. Parsing an address takes microseconds.
_SEEN = 64
#: Content types that a page can send without a preflight (Fetch standard, "CORS-safelisted request-header").
_ANY_PAGES = (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data")


class Pages:
    """Protects a router without keys: refuses control calls of other sites' web pages.

    On loopback, also refuses any request with a foreign ``Host``, and control calls with a ``Content-Type`` that any
    page can send.

    ``needed`` returns the level that a request needs. ``host``: the address that the router listens on. ``origins``:
    the sites that ``--cors-allowed-origins`` names; with ``*``, nothing is refused.
    """

    def __init__(self, needed: Callable[[Scope], Level], host: str, origins: Iterable[str]) -> None:
        self._needed = needed
        self._origins = {origin.rstrip("/").encode() for origin in origins}
        self._on_loopback = is_loopback(host)
        self._seen: set[bytes] = set()
        self._hosts = {"", "localhost", host, *(urlsplit(origin).hostname or "" for origin in origins)}

    def refusal(self, scope: Scope) -> HTTPError | None:
        """Return the error that refuses the request of ``scope``, or None when the request is allowed."""
        if b"*" in self._origins:
            return None
        host = origin = site = kind = b""
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
            elif name == b"origin":
                origin = value
            elif name == b"sec-fetch-site":
                site = value
            elif name == b"content-type":
                kind = value.partition(b";")[0].strip().lower()
        if self._on_loopback and host not in self._seen and not self._is_allowed_host(host):
            shown = host.decode("latin-1")
            return Forbidden(
                f"Host: wanted localhost or an IP address, got {shown}: a router on loopback without keys refuses other"
                " names; set --api-key, or name the site by --cors-allowed-origins"
            )
        is_foreign = site not in _OWN_SITES if not origin else not self._is_known(origin, scope, host)
        is_odd = self._on_loopback and kind in _ANY_PAGES
        if not (is_foreign or is_odd) or self._needed(scope) is not Level.ADMIN:
            return None
        if is_foreign:
            return Forbidden(
                "a web page of another site sent this request; without keys only the sites that"
                " --cors-allowed-origins names may control the router or its engines"
            )
        return UnsupportedMediaType(
            f"wanted Content-Type: application/json, got {kind.decode()}, which any web page can send."
            f" {scope['method']} {scope['raw_path'][:200].decode('latin-1')} is a control call or an unknown path, and"
            " these need application/json: check the path; with curl, add -H 'Content-Type: application/json'"
        )

    def _is_allowed_host(self, value: bytes) -> bool:
        """Return True for the ``Host`` of an allowed site, and for a ``Host`` that cannot be another site's name."""
        host = value.decode("latin-1").lower()
        host = host.partition("]")[0][1:] if host.startswith("[") else host.partition(":")[0]
        is_here = host in self._hosts or host.endswith(".localhost") or _is_address(host)
        if is_here and len(self._seen) < _SEEN:
            self._seen.add(value)
        return is_here

    def _is_known(self, origin: bytes, scope: Scope, host: bytes) -> bool:
        return origin in self._origins or origin == b"%b://%b" % (scope["scheme"].encode(), host)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
