"""Many texts in one request: encoding them must not keep the event loop from everybody else."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any, cast

import pytest

from splash_trt.frontend.background import BackgroundThreads
from splash_trt.frontend.errors import ApiError
from splash_trt.frontend.metrics import Metrics
from splash_trt.frontend.sampling import Defaults
from splash_trt.frontend.serving import LONG_TEXT, Limits, Serving


class Recorder:
    """A tokenizer that remembers which thread asked for what."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, threading.Thread]] = []

    def encode(self, text: str, limit: int | None = None, add_special_tokens: bool = True) -> list[int]:
        self.calls.append((text, threading.current_thread()))
        return [len(text)]


def _serving(tokenizer: Recorder) -> Serving:
    return Serving(
        engine=cast(Any, None),
        metrics=Metrics(),
        tokenizer=cast(Any, tokenizer),
        grammars=None,
        model_name="m",
        limits=Limits(max_queued=3, max_body_bytes=1 << 20, ready_deadline_s=1.0),
        defaults=Defaults(),
        tool_parser="none",
        reasoning_parser="none",
        background=BackgroundThreads(),
    )


def test_too_many_prompts_are_refused_before_any_is_encoded() -> None:
    tokenizer = Recorder()
    with pytest.raises(ApiError, match="prompt: 4 prompts are too many; at most 3"):
        asyncio.run(_serving(tokenizer).encode(["a", "b", "c", "d"], 100))
    assert not tokenizer.calls


@pytest.mark.parametrize("beside", [False, True])
def test_short_texts_that_are_long_together_are_encoded_beside_the_loop(beside: bool) -> None:
    tokenizer, length = Recorder(), LONG_TEXT // 2
    texts: list[str | list[int]] = ["x" * length, "y" * (length + beside)]
    assert asyncio.run(_serving(tokenizer).encode(texts, 100)) == [(length,), (length + beside,)]
    assert [text for text, _ in tokenizer.calls] == texts
    assert all((thread is not threading.main_thread()) == beside for _, thread in tokenizer.calls)


def test_token_ids_stay_as_they_are() -> None:
    tokenizer = Recorder()
    assert asyncio.run(_serving(tokenizer).encode([[1, 2], [3]], 100)) == [(1, 2), (3,)]
    assert not tokenizer.calls


def test_a_process_that_ends_does_not_wait_for_what_is_encoded() -> None:
    code = (
        "import asyncio, time\n"
        "from splash_trt.frontend.background import BackgroundThreads\n"
        "async def main():\n"
        "    await asyncio.wait_for(BackgroundThreads().run(lambda: time.sleep(60)), 0.1)\n"
        "try:\n"
        "    asyncio.run(main())\n"
        "except TimeoutError as error:\n"
        "    print('ended')\n"
        "except asyncio.TimeoutError:\n"
        "    print('ended')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout == "ended\n", done.stderr


def test_what_runs_beside_the_loop_gives_its_result_or_its_error() -> None:
    async def both() -> None:
        background = BackgroundThreads()
        assert await asyncio.gather(*(background.run(lambda n=n: n * n) for n in range(9))) == [n * n for n in range(9)]
        with pytest.raises(ZeroDivisionError):
            await background.run(lambda: 1 // 0)

    asyncio.run(both())
