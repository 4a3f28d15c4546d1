"""Messages between frontend and rank 0: whatever is sent arrives; whatever else arrives is a ValueError."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash_trt import link
from splash_trt.link import (
    Cancel,
    Decided,
    Explain,
    Explanation,
    Frames,
    LayoutCapacity,
    LayoutReply,
    Ready,
    SetLayout,
    Shutdown,
    Status,
    Submit,
    SwitchReport,
)
from splash_trt.request import FinishReason, Grammar, GrammarKind, Request, SamplingParams, TokenDelta, TokenLogprob

RUNS = settings(deadline=None, derandomize=True)
IDS = st.integers(0, 2**31 - 1)
LOGPROBS = st.lists(
    st.builds(
        TokenLogprob,
        IDS,
        st.floats(allow_nan=False),
        st.lists(st.tuples(IDS, st.floats(allow_nan=False)), max_size=3).map(tuple),
    ),
    max_size=3,
).map(tuple)
GRAMMARS = st.one_of(
    st.just(Grammar(GrammarKind.JSON_OBJECT)),
    st.builds(Grammar, st.just(GrammarKind.REGEX), st.text(st.characters(codec="utf-8"), min_size=1)),
)
PARAMETERS: dict[str, Any] = dict(
    max_tokens=st.integers(1, 2**40),
    temperature=st.floats(0, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.5, 2),
    logit_bias=st.dictionaries(IDS, st.floats(-100, 100), max_size=3),
    top_k=st.integers(0, 2**40),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop_token_ids=st.lists(IDS, max_size=4).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)
SAMPLING = st.one_of(
    st.builds(SamplingParams, ignore_eos=st.booleans(), **PARAMETERS),
    st.builds(SamplingParams, grammar=GRAMMARS, **PARAMETERS),
)
REQUESTS = st.builds(
    Request,
    id=st.text(),
    prompt=st.lists(IDS, max_size=8).map(tuple),
    sampling=SAMPLING,
    priority=st.integers(-(2**31), 2**31),
    deadline_s=st.none() | st.floats(min_value=0, exclude_min=True, allow_nan=False),
)
TO_ENGINE = st.one_of(
    st.builds(Submit, REQUESTS),
    st.builds(Cancel, st.text()),
    st.builds(SetLayout, st.integers(0, 2**40), st.text(), st.booleans()),
    st.builds(Explain, st.integers(0, 2**40)),
    st.builds(Shutdown, st.booleans()),
)
DELTAS = st.builds(
    TokenDelta,
    st.text(),
    st.lists(IDS, max_size=3).map(tuple),
    LOGPROBS,
    LOGPROBS,
    st.none() | st.sampled_from(list(FinishReason)),
    st.none() | st.text(),
    st.none() | st.floats(allow_nan=False),
)
COUNT = st.integers(0, 2**40)
COUNTS = st.lists(COUNT, max_size=3).map(tuple)
SHARE = st.floats(0, 1)
CAPACITIES = st.dictionaries(st.text(), st.builds(LayoutCapacity, COUNTS, COUNT, COUNT), max_size=2)
STATUS = st.builds(
    Status, st.text(), COUNT, st.text(), st.none() | st.text(), SHARE, st.text(), COUNT, COUNT, COUNTS, COUNTS, COUNTS
)
RECORDS = st.dictionaries(st.text(), st.none() | st.text() | COUNT | SHARE, max_size=3)
NAMES = st.lists(st.text(), max_size=2).map(tuple)
FROM_ENGINE = st.one_of(
    st.builds(Ready, st.text(), COUNT, COUNT, st.lists(IDS, max_size=3).map(tuple), COUNT, NAMES, CAPACITIES),
    st.builds(
        Frames,
        st.text(),
        COUNT,
        COUNT,
        SHARE,
        STATUS,
        st.lists(DELTAS, max_size=3).map(tuple),
        st.text(),
        COUNT,
        st.none() | st.builds(Decided, st.text(), st.text(), st.text()),
    ),
    st.builds(SwitchReport, st.text(), COUNT, RECORDS),
    st.builds(LayoutReply, st.text(), COUNT, st.none() | st.text()),
    st.builds(Explanation, st.text(), COUNT, RECORDS),
)


@RUNS
@given(TO_ENGINE)
def test_round_trip_to_the_engine(message: Any) -> None:
    back = link.decode_to_engine(link.encode(message))
    assert back == message and type(back) is type(message)


@RUNS
@given(FROM_ENGINE)
def test_round_trip_from_the_engine(message: Any) -> None:
    back = link.decode_from_engine(link.encode(message))
    assert back == message and type(back) is type(message)


@RUNS
@given(st.binary(max_size=64))
def test_any_bytes_are_a_message_or_a_value_error(data: bytes) -> None:
    for decode in (link.decode_to_engine, link.decode_from_engine):
        with pytest.raises(ValueError):
            decode(data)


@RUNS
@given(TO_ENGINE, st.data())
def test_a_damaged_message_is_a_message_or_a_value_error(message: Any, data: st.DataObject) -> None:
    sent = bytearray(link.encode(message))
    sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    try:
        link.decode_to_engine(bytes(sent))
    except ValueError:
        pass
    cut = bytes(sent)[: data.draw(st.integers(0, len(sent) - 1))]
    with pytest.raises(ValueError):
        link.decode_to_engine(cut)


@pytest.mark.parametrize("message", [Ready("i", 1, 2, (), 1, (), {}), LayoutReply("i", 1)])
def test_a_message_to_the_other_side_is_refused(message: Any) -> None:
    with pytest.raises(ValueError):
        link.decode_to_engine(link.encode(message))


def test_sampling_parameters_are_checked_on_arrival() -> None:
    """What is not a SamplingParams here must not become one by travelling."""
    good = link.encode(Submit(Request(id="a", prompt=(1,), sampling=SamplingParams(max_tokens=77))))
    assert good.count(b"\x4d") == 1
    with pytest.raises(ValueError, match="max_tokens"):
        link.decode_to_engine(good.replace(b"\x4d", b"\x00"))


def test_deep_nesting_is_refused_like_any_other_garbage() -> None:
    with pytest.raises(ValueError, match="nests too deeply"):
        link.decode_to_engine(b"\x83\xa4type\xa6Cancel\xaarequest_id\xa1a\xa1x" + b"\x91" * 1_000_000 + b"\xc0")
