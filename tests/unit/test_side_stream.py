"""Work on a GPU's side stream: what goes to it, and what waits for what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from splash_trt.runtime.side_stream import SideStream

LOG: list[str] = []


class Stream:
    def __init__(self, device: torch.device | None, priority: int) -> None:
        self.name = "urgent" if priority < 0 else "other"

    def wait_stream(self, other: Stream) -> None:
        LOG.append(f"{self.name} waits for {other.name}")


class Main(Stream):
    def __init__(self) -> None:
        self.name = "main"


@contextmanager
def entered(stream: Stream) -> Iterator[None]:
    LOG.append(f"into {stream.name}")
    yield
    LOG.append("back")


def test_each_join_waits_for_the_stream_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    main = Main()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    side = SideStream(torch.device("cuda", 0))
    for urgent in (False, True, True, False):
        LOG.clear()
        with side.run(urgent=urgent):
            LOG.append("work")
        side.join()
        name = "urgent" if urgent else "other"
        assert LOG == [f"{name} waits for main", f"into {name}", "work", "back", f"main waits for {name}"]


def test_without_streams_work_is_done_at_once() -> None:
    side, done = SideStream(torch.device("cpu")), []
    with side.run(urgent=True):
        done.append(1)
    side.join()
    assert done == [1]
