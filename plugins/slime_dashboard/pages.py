"""The pages: files of ``static/``, read once at start.

A further page is added in four steps:

1. ``static/NAME.html`` has the contents of ``<main>``. ``static/page.html``, which all pages share, has the rest.
2. ``static/NAME.js`` is a module. It imports ``./shell.js``: ``getData`` asks for data with the key of the user,
   ``poll`` repeats a task while the page is visible, ``element`` makes elements and escapes their text.
   ``static/NAME.css`` is optional; ``static/style.css`` has the colours, as custom properties for both themes.
3. ``PAGES`` gets a :class:`Page`. Its address is ``/ui/NAME``.
4. Data come from a ``ControlRoute`` at ``/ui/data/...``, which ``Dashboard.routes`` returns. Data need the key that
   ``GET /workers`` needs. Pages and static files need no key, so they must not contain data.

Texts of clients and workers, such as names of sessions, reach the document as ``textContent`` only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

__all__ = ["PAGES", "Page", "Pages"]

#: No script, style or picture from elsewhere, no inline script, no frame around a page.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_MEDIA_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_STATIC = files("slime_dashboard") / "static"


@dataclass(frozen=True, slots=True)
class Page:
    """A page. ``name``: the name of its files, and the last part of its address.

    ``libraries``: scripts, other than modules, that the page loads first. ``styles``: further style sheets.
    """

    name: str
    title: str
    libraries: tuple[str, ...] = ()
    styles: tuple[str, ...] = ()


#: The first page is at ``/ui``, the others are at ``/ui/NAME``.
PAGES: tuple[Page, ...] = (
    Page("overview", "Overview", ("uPlot.iife.min.js",), ("uPlot.min.css",)),
    Page("trajectory", "Trajectory"),
)


class Pages:
    """Answers requests for pages and static files. ``path``: the path of the first page."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._static = {name: _File.of(name, body) for name, body in _static_files()}

    def public_paths(self) -> list[str]:
        """Return the paths of all pages and static files."""
        path = self._path
        pages = [self._address(page) for page in PAGES]
        return [*pages, f"{path}/", *(f"{path}/static/{name}" for name in self._static)]

    def routes(self) -> list[Route]:
        """Return the routes of all pages and static files."""
        path = self._path
        return [
            *(Route(self._address(page), self._answer(page), methods=["GET"]) for page in PAGES),
            Route(f"{path}/", self._without_slash, methods=["GET"]),
            Route(f"{path}/static/{{name}}", self._static_file, methods=["GET"]),
        ]

    def _address(self, page: Page) -> str:
        return self._path if page is PAGES[0] else f"{self._path}/{page.name}"

    def _answer(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        file = _File(self._html(page).encode(), "text/html; charset=utf-8")

        async def answer(request: Request) -> Response:
            return file.response(request)

        return answer

    def _html(self, page: Page) -> str:
        # Addresses are relative, so that a proxy may serve the router below a path of its own.
        last = self._path.rpartition("/")[2]
        base = f"{last}/" if page is PAGES[0] else ""
        addresses = [last if base else f"../{last}", *(f"{base}{other.name}" for other in PAGES[1:])]
        here = ' aria-current="page"'
        styles = ["style.css", *page.styles]
        if f"{page.name}.css" in self._static:
            styles.append(f"{page.name}.css")
        return Template(_text("page.html")).substitute(
            title=escape(page.title),
            base=base,
            first=addresses[0],
            pages=_lines(
                f'<a href="{address}"{here if each is page else ""}>{escape(each.title)}</a>'
                for each, address in zip(PAGES, addresses, strict=True)
            ),
            styles=_lines(f'<link rel="stylesheet" href="{base}static/{name}">' for name in styles),
            libraries=_lines(f'<script src="{base}static/{name}" defer></script>' for name in page.libraries),
            module=f"{base}static/{page.name}.js",
            main=_text(f"{page.name}.html"),
        )

    async def _without_slash(self, _: Request) -> Response:
        return RedirectResponse(f"../{self._path.rpartition('/')[2]}", headers=_HEADERS)

    async def _static_file(self, request: Request) -> Response:
        file = self._static.get(request.path_params["name"])
        if file is None:
            raise HTTPException(404, "no such file")
        return file.response(request)


class _File:
    """A file that browsers cache, and revalidate by its ``ETag``."""

    def __init__(self, body: bytes, media_type: str) -> None:
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        self._body = body
        self._headers = {**_HEADERS, "content-type": media_type, "etag": tag}

    @classmethod
    def of(cls, name: str, body: bytes) -> _File:
        """Return the file ``name`` of ``static/``."""
        return cls(body, f"{_MEDIA_TYPES[name.rpartition('.')[2]]}; charset=utf-8")

    def response(self, request: Request) -> Response:
        """Return the file, or a 304 when the browser's copy is up to date."""
        if self._headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, headers=self._headers)


def _static_files() -> Iterator[tuple[str, bytes]]:
    for file in _STATIC.iterdir():
        if file.name.rpartition(".")[2] in _MEDIA_TYPES:
            yield file.name, file.read_bytes()


def _text(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


def _lines(tags: Iterable[str]) -> str:
    return "\n".join(tags)
