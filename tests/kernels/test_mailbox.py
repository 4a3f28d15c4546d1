"""The halves of a mailbox: where buffers are in them, and buffers that are asked for too late."""

from __future__ import annotations

import pytest
import torch

from splash_trt.runtime.mailbox import HALVES_AT, Mailbox, mailbox_bytes

pytestmark = pytest.mark.kernels


def make(half: int = 4096) -> Mailbox:
    return Mailbox(torch.zeros(mailbox_bytes(half), dtype=torch.uint8), half)


def test_buffers_follow_one_another_in_a_half_and_begin_anew_in_the_other() -> None:
    mailbox = make()
    first, second = mailbox.buffer((3, 5), torch.float64), mailbox.buffer((7,), torch.bfloat16)
    assert first.shape == (3, 5) and second.dtype is torch.bfloat16
    assert [mailbox.place(x) for x in (first, second)] == [HALVES_AT, HALVES_AT + 256]
    slots, tokens = mailbox.slots, mailbox.tokens
    mailbox.turn()
    assert mailbox.place(mailbox.buffer((2,), torch.int32)) == HALVES_AT + 4096
    assert mailbox.slots != slots and mailbox.tokens != tokens
    mailbox.turn()
    assert mailbox.place(mailbox.buffer((2,), torch.int32)) == HALVES_AT and mailbox.slots == slots
    mailbox.turn()
    mailbox.reset()
    assert mailbox.place(mailbox.buffer((2,), torch.int32)) == HALVES_AT


def test_nothing_lies_on_anything_else() -> None:
    mailbox = make(512)
    places = [mailbox.tokens, mailbox.slots, mailbox.start]
    mailbox.turn()
    tokens, slots, start = mailbox.tokens, mailbox.slots, mailbox.start
    assert places[0] < tokens < places[1] < slots < places[2] < start == mailbox_bytes(512) - 512


def test_a_buffer_of_the_other_half_is_a_bug() -> None:
    mailbox = make()
    late = mailbox.buffer((4,), torch.float32)
    mailbox.turn()
    with pytest.raises(AssertionError, match="not a buffer of this half"):
        mailbox.place(late)
    with pytest.raises(AssertionError, match="not a buffer of this half"):
        mailbox.place(torch.zeros(4))


def test_a_half_is_full_at_its_end() -> None:
    mailbox = make(1024)
    mailbox.buffer((512,), torch.bfloat16)
    with pytest.raises(AssertionError):
        mailbox.buffer((1,), torch.uint8)
