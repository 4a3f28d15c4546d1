"""GET /dashboard, the page and its files, and GET /v1/timeline, the data that it draws."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from splash_trt.frontend.dashboard.history import History
from splash_trt.frontend.errors import ApiError
from splash_trt.frontend.serving import json_response

FOLDER = Path(__file__).with_name("static")
CONTENT_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE = "page.html"
ROOT = "/"
PATHS = {"/dashboard": PAGE} | {
    f"/dashboard/{path.name}": path.name
    for path in sorted(FOLDER.iterdir())
    if path.suffix in CONTENT_TYPES and path.name != PAGE
}
"""{path: file}. These need no key, as they say nothing about anybody's requests; the page asks its user for the key."""

HEADERS = {
    # Nothing is loaded from elsewhere, there is no inline code or style, no other page may frame this one, and its form
    # is sent by the page's own code.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class DashboardRoutes:
    def __init__(self, history: History) -> None:
        self._history = history
        self._files = {path: (FOLDER / name).read_bytes() for path, name in PATHS.items()}

    def add_to(self, router: web.UrlDispatcher) -> None:
        for path in PATHS:
            router.add_get(path, self._file)
        router.add_get(ROOT, self._to_page)
        router.add_get("/v1/timeline", self._timeline)

    async def _file(self, http: web.Request) -> web.Response:
        kind = CONTENT_TYPES[Path(PATHS[http.path]).suffix]
        return web.Response(body=self._files[http.path], headers=HEADERS, content_type=kind, charset="utf-8")

    async def _to_page(self, http: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": "/dashboard"})

    async def _timeline(self, http: web.Request) -> web.Response:
        return json_response(self._history.since(_after(http)))


def _after(http: web.Request) -> int:
    values = http.query.getall("after", ["0"])
    if len(values) != 1 or not values[0].isascii() or not values[0].isdigit() or len(values[0]) > 12:
        message = f"after: {','.join(values)[:40]!r} is not allowed; it must be one whole number of seconds, from 0 on"
        raise ApiError(message, param="after")
    return int(values[0])
