"""A single token of a request that goes on is sent as two numbers: what is decoded is what was encoded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splash_trt import link
from splash_trt.link import Frames, Status
from splash_trt.request import FinishReason, TokenDelta, TokenLogprob

STATUS = Status("tp", 0, "steady", None, 1.0, "auto", 0, 0, (0,), (0,), (64,))
TOKENS = st.integers(0, 1 << 30)
LOGPROBS = st.lists(st.builds(TokenLogprob, TOKENS, st.floats(-9, 0)), max_size=2).map(tuple)
EXTRAS = st.fixed_dictionaries(
    {},
    optional={
        "logprobs": LOGPROBS,
        "prompt_logprobs": LOGPROBS,
        "finish": st.none() | st.sampled_from(FinishReason),
        "error": st.none() | st.text(max_size=3),
        "queued_s": st.none() | st.floats(0, 9),
    },
)
STEPS = st.lists(
    st.tuples(st.booleans(), st.just(()) | TOKENS.map(lambda t: (t,)) | st.lists(TOKENS).map(tuple), EXTRAS), max_size=9
)


@given(STEPS, st.integers(0, 9))
def test_all_that_is_told_arrives(step: list[tuple[bool, tuple[int, ...], dict[str, object]]], elsewhere: int) -> None:
    deltas = [TokenDelta(f"r{i}", tokens, **extras) for i, (_, tokens, extras) in enumerate(step)]  # type: ignore[arg-type]
    known = {100 + i: f"r{i}" for i, (has_number, _, _) in enumerate(step) if has_number}
    numbered = [(100 + i if has_number else None, deltas[i]) for i, (has_number, _, _) in enumerate(step)]
    numbers, tokens, others = link.in_columns(numbered)
    frames = Frames("i", 1, 1, 0.1, STATUS, others, numbers=numbers, tokens=tokens, num_elsewhere=elsewhere)
    back = link.decode_from_engine(link.encode(frames))
    assert isinstance(back, Frames) and back == frames
    assert sorted(link.all_deltas(back, known), key=lambda d: d.request_id) == sorted(
        deltas, key=lambda d: d.request_id
    )
    assert back.num_output == elsewhere + sum(len(delta.tokens) for delta in deltas)


def test_what_is_plain_takes_the_short_way_and_nothing_else() -> None:
    plain, finished = TokenDelta("a", (7,)), TokenDelta("b", (8,), finish=FinishReason.STOP)
    two, waited = TokenDelta("c", (1, 2)), TokenDelta("d", (3,), queued_s=0.0)
    numbers, tokens, others = link.in_columns([(1, plain), (2, finished), (3, two), (4, waited), (None, plain)])
    assert (numbers, tokens, others) == ((1,), (7,), (finished, two, waited, plain))


def test_what_is_told_of_a_request_that_was_cancelled_is_left_out() -> None:
    frames = Frames("i", 1, 2, 0.1, STATUS, numbers=(1, 2), tokens=(7, 8))
    assert list(link.all_deltas(frames, {2: "b"})) == [TokenDelta("b", (8,))]


def test_columns_of_different_lengths_are_no_message() -> None:
    frames = Frames("i", 1, 2, 0.1, STATUS, numbers=(12345, 54321), tokens=(7, 8))
    data = link.encode(frames).replace(link.encode((7, 8)), link.encode((7,)))  # type: ignore[arg-type]
    try:
        link.decode_from_engine(data)
    except ValueError as error:
        assert "1 for 2 numbers" in str(error)
    else:
        raise AssertionError("it was decoded")
