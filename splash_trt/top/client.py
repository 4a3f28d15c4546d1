"""Asks a running server for what `splash-trt top` shows. By http.client, which uses no proxy and no event loop."""

from __future__ import annotations

import http.client
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec

from splash_trt.frontend.dashboard.history import Timeline
from splash_trt.frontend.errors import ErrorBody
from splash_trt.frontend.operator_routes import LayoutAnswer, Models

DEADLINE_S = 15.0  # the server itself waits some seconds for the engine's answer to explain=1

T = TypeVar("T")


class NotReached(Exception):
    """No server answers, or what answers is not a Splash-TRT server; the message is for the user."""


class Refused(Exception):
    """The server answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Snapshot:
    model: str
    layout: LayoutAnswer
    timeline: Timeline


class Client:
    """A client of the server at `url`. Raises ValueError if that is not a URL."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url
        try:
            self._at: SplitResult = urlsplit(url if "://" in url else f"http://{url}")
            host = self._at.hostname or ""
            is_url = self._at.scheme in ("http", "https") and bool(host.encode("idna"))
            self._port = self._at.port
            http.client.HTTPConnection(host, self._port)  # does not connect; refuses characters that no host name has
        except (ValueError, http.client.InvalidURL):
            is_url = False
        if not is_url:
            raise ValueError(f"url: {url!r} is not allowed; it must be like http://127.0.0.1:8000")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._model = ""
        self._server = ""

    def snapshot(self, after: int) -> Snapshot:
        """The server's present state, and its timeline from second `after` on. Raises NotReached or Refused."""
        timeline = self._ask(f"/v1/timeline?after={after}", Timeline)
        if timeline.server != self._server:
            self._model = self._ask("/v1/models", Models).data[0].id
            self._server = timeline.server
        return Snapshot(self._model, self._ask("/v1/layout?explain=1", LayoutAnswer), timeline)

    def _ask(self, path: str, kind: type[T]) -> T:
        connect = http.client.HTTPSConnection if self._at.scheme == "https" else http.client.HTTPConnection
        assert self._at.hostname is not None
        connection = connect(self._at.hostname, self._port, timeout=DEADLINE_S)
        try:
            connection.request("GET", self._at.path.rstrip("/") + path, headers=self._headers)
            response = connection.getresponse()
            status, data = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise NotReached(f"no server answers at {self.url}: {error}") from None
        finally:
            connection.close()
        try:
            if status != 200:
                raise Refused(status, msgspec.json.decode(data, type=ErrorBody).error.message)
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise NotReached(f"what answers at {self.url} is no Splash-TRT server, or one of another version") from None
