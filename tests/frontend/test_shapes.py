"""Events with only text are joined from prepared bytes: these are the same as if they were encoded as a whole."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash_trt.frontend.responses import Usage
from splash_trt.frontend.shapes import MARK, ChatShape, CompletionShape, Shape, Wanted, event
from splash_trt.frontend.stream import Piece

KINDS = (CompletionShape, ChatShape)
TEXT = st.text() | st.just(MARK)


def shape_of(kind: type[Shape], model: str = "m", *, usage_always: bool = False, token_ids: bool = False) -> Shape:
    wanted = Wanted(
        logprobs=None, prompt_logprobs=None, token_ids=token_ids, usage_at_end=False, usage_always=usage_always
    )
    return kind("id", model, str, None, wanted)


def counts() -> Usage:
    return Usage.of(1, 2)


@pytest.mark.parametrize("kind", KINDS)
@given(index=st.integers(0, 3), texts=st.lists(TEXT.filter(bool), min_size=1, max_size=3), model=TEXT)
def test_a_plain_event_is_like_any_other(kind: type[Shape], index: int, texts: list[str], model: str) -> None:
    shape = shape_of(kind, model)
    for text in texts:
        piece = Piece(text=text, tokens=[1])
        assert shape.chunk(index, piece, counts) == shape._event([shape._part(index, piece)], counts)


@pytest.mark.parametrize("kind", KINDS)
def test_what_tells_more_is_no_plain_event(kind: type[Shape]) -> None:
    def choice(shape: Shape, piece: Piece) -> dict[str, object]:
        told = json.loads(shape.chunk(0, piece, counts).removeprefix(b"data: "))
        return dict(told["choices"][0], usage=told.get("usage"))

    assert choice(shape_of(kind), Piece(text="a", finish="stop"))["finish_reason"] == "stop"
    assert choice(shape_of(kind, token_ids=True), Piece(text="a", tokens=[7]))["token_ids"] == [7]
    usage = choice(shape_of(kind, usage_always=True), Piece(text="a"))["usage"]
    assert usage == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    thought = choice(shape_of(ChatShape), Piece(text="a", reasoning="why"))["delta"]
    assert thought == {"content": "a", "reasoning_content": "why", "reasoning": "why"}
    assert shape_of(kind).chunk(0, Piece(), counts) == b"" and event(b"x") == b"data: x\n\n"
