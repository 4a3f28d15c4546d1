"""Text in pieces: whatever the cuts, the same text comes out, and never a stop string or half a character."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from splash_trt.frontend.stream import Answer, Piece, StopScanner
from splash_trt.frontend.tokenizer import Tokenizer
from splash_trt.request import FinishReason, TokenDelta, TokenLogprob

RUNS = settings(deadline=None, derandomize=True, max_examples=300)
STOPS = st.lists(st.text("ab\u20ac", min_size=1, max_size=4), max_size=4).map(tuple)


def expected(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """By trying every end in order."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@RUNS
@given(st.lists(st.text("abc\u20ac", max_size=4), max_size=8), STOPS)
def test_stops_do_not_depend_on_the_cuts(pieces: list[str], stops: tuple[str, ...]) -> None:
    scanner, shown, found = StopScanner(stops), "", False
    wanted, is_stopped = expected("".join(pieces), stops)
    for piece in pieces:
        text, found = scanner.push(piece)
        shown += text
        assert wanted.startswith(shown)
        if found:
            break
    assert found == is_stopped
    assert shown + ("" if found else scanner.flush()) == wanted


def test_text_is_held_back_only_while_it_could_begin_a_stop_string() -> None:
    scanner = StopScanner(("</end>",))
    assert [scanner.push(p) for p in ("a <", "b", "</e", "x</", "end", "> more")] == [
        ("a ", False),
        ("<b", False),
        ("", False),
        ("</ex", False),
        ("", False),
        ("", True),
    ]


@RUNS
@given(st.lists(st.text("abc\u20ac", max_size=4), max_size=8), STOPS, st.integers(0, 8))
def test_no_stop_string_ends_in_exempt_text(pieces: list[str], stops: tuple[str, ...], num_exempt: int) -> None:
    begin, text = len("".join(pieces[:num_exempt])), "".join(pieces)
    ends = [e for e in range(begin + 1, len(text) + 1) if any(text[:e].endswith(stop) for stop in stops)]
    wanted = text
    if ends:
        wanted = text[: ends[0] - max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))]
    scanner, shown, found = StopScanner(stops), "", False
    for number, piece in enumerate(pieces):
        more, found = scanner.push(piece, exempt=number < num_exempt)
        shown += more
        assert wanted.startswith(shown)
        if found:
            break
    assert found == bool(ends)
    assert shown + ("" if found else scanner.flush()) == wanted


def test_min_tokens_hold_stop_strings_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a|b|c")
    assert len(ids) == 5
    for min_tokens, stop, text in ((0, "|", "a"), (1, "|", "a"), (2, "|", "a|b"), (2, "|b", "a"), (3, "|b", "a|b|c")):
        answer = Answer(tokenizer.detokenizer(), StopScanner((stop,)), min_tokens=min_tokens)
        shown = ""
        for token in ids:
            answer.add(TokenDelta("a", (token,)))
            shown += answer.take().text
            if answer.finish is not None:
                break
        else:
            answer.add(TokenDelta("a", (), finish=FinishReason.LENGTH))
            shown += answer.take().text
        assert (shown, answer.finish) == (text, "length" if text == "a|b|c" else "stop")


def answer_to(tokenizer: Tokenizer, stops: tuple[str, ...] = ()) -> Answer:
    return Answer(tokenizer.detokenizer(), StopScanner(stops))


def test_pieces_are_whole_characters(tokenizer: Tokenizer) -> None:
    text = "caf\u00e9 \u20ac5 \U0001f600!"
    answer, pieces = answer_to(tokenizer), list[Piece]()
    ids = tokenizer.encode(text)
    for token in ids:
        answer.add(TokenDelta("a", (token,), finish=FinishReason.LENGTH if len(pieces) == len(ids) - 1 else None))
        pieces.append(answer.take())
    assert "".join(piece.text for piece in pieces) == text
    assert any(piece.text == "" for piece in pieces) and not any("\ufffd" in piece.text for piece in pieces)
    assert [token for piece in pieces for token in piece.tokens] == ids
    assert pieces[-1].finish == "length" == answer.finish


def test_a_character_that_is_never_finished(tokenizer: Tokenizer) -> None:
    answer = answer_to(tokenizer)
    answer.add(TokenDelta("a", tuple(tokenizer.encode("x\u20ac")[:3])))
    assert answer.take().text == "x"
    answer.add(TokenDelta("a", (), finish=FinishReason.LENGTH))
    assert answer.take().text == "\ufffd"


def test_a_stop_string_ends_within_a_delta(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a|b|c")
    logprobs = tuple(TokenLogprob(token, -1.0) for token in ids)
    answer = answer_to(tokenizer, ("|c", "b|"))
    answer.add(TokenDelta("a", tuple(ids), logprobs))
    piece = answer.take()
    assert (piece.text, piece.finish, piece.tokens) == ("a|", "stop", ids[:4])
    assert answer.num_tokens == 4 and [shown.offset for shown in piece.logprobs] == [0, 1, 2, 2]


def test_what_was_held_back_comes_at_the_end(tokenizer: Tokenizer) -> None:
    answer = answer_to(tokenizer, ("!!!",))
    answer.add(TokenDelta("a", tuple(tokenizer.encode("hey!!"))))
    assert answer.take().text == "hey"
    answer.add(TokenDelta("a", (), finish=FinishReason.STOP))
    piece = answer.take()
    assert (piece.text, piece.finish) == ("!!", "stop")


def test_the_token_that_stopped_the_engine_has_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab")
    answer = answer_to(tokenizer)
    answer.add(TokenDelta("a", tuple(ids), finish=FinishReason.STOP))
    assert answer.take().text == "a" and answer.num_tokens == 2
    answer = answer_to(tokenizer)
    answer.add(TokenDelta("a", tuple(ids), finish=FinishReason.LENGTH))
    assert answer.take().text == "ab"


def test_without_text(tokenizer: Tokenizer) -> None:
    answer = Answer(None, StopScanner(()))
    answer.add(TokenDelta("a", (5, 6), finish=FinishReason.LENGTH))
    piece = answer.take()
    assert (piece.text, piece.tokens, piece.finish) == ("", [5, 6], "length")
