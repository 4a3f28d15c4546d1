"""One scheduler in situations made by hand. tests/oracles/checked_scheduler.py checks every plan."""

from __future__ import annotations

from typing import Any

import pytest

from splash_trt.config import Layout
from splash_trt.plan import SAMPLE
from splash_trt.request import FinishReason
from tests.oracles.checked_scheduler import EOS, CheckedScheduler, request
from tests.oracles.simulated_ranks import VOCAB, expected_tokens, logprob, next_token

LAYOUTS = list(Layout)


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_all_running_requests_short_of_a_page_in_one_step(plans_in_flight: int) -> None:
    c = CheckedScheduler((4,), plans_in_flight=plans_in_flight)
    pair = [request("a", 4, 10), request("b", 4, 10)]
    c.add(*pair)
    c.run(100)
    assert c.preemptions > 0
    for r in pair:
        assert c.outputs.tokens[r.id] == expected_tokens(r)


# What cannot be served


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ((), ["prompt", "at least one token"]),
        ((1, VOCAB), ["prompt", str(VOCAB), f"0 to {VOCAB - 1}"]),
        ((-1,), ["prompt", "-1", f"0 to {VOCAB - 1}"]),
        ((1,) * 30, ["prompt", "30 tokens", "at most 29"]),
    ],
)
def test_prompts_that_no_model_of_this_kind_takes(prompt: tuple[int, ...], words: list[str]) -> None:
    c = CheckedScheduler((64,), max_context=30)
    with pytest.raises(ValueError) as caught:
        c.add(request("a", prompt))
    assert all(word in str(caught.value) for word in words), caught.value
    assert c.idle
    c.scheduler.check_idle()


def test_an_id_in_use_is_refused_and_the_first_request_goes_on() -> None:
    c = CheckedScheduler()
    first = request("a", 5, 6)
    c.add(first)
    c.step()
    with pytest.raises(ValueError, match="id: 'a'"):
        c.add(request("a", 2, 2))
    c.run()
    assert c.outputs.tokens == {"a": expected_tokens(first)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_a_request_that_reaches_the_end_of_the_cache_gets_an_answer(layout: Layout, plans_in_flight: int) -> None:
    c = CheckedScheduler((3, 2, 3), layout=layout, plans_in_flight=plans_in_flight)
    r = request("a", 5, 1000)
    c.add(r)
    c.run()
    assert c.outputs.finish["a"] is FinishReason.LENGTH
    assert len(c.outputs.tokens["a"]) == c.request_tokens - 5
    assert c.outputs.tokens["a"] == expected_tokens(r, limit=c.request_tokens)
    assert f"at most {c.request_tokens} tokens" in (c.outputs.error["a"] or "")
    with pytest.raises(ValueError, match=f"prompt: {c.request_tokens} tokens.*{c.request_tokens}.*memory_bytes"):
        c.add(request("b", c.request_tokens))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prompt_one_token_short_of_the_cache_gets_one_token(layout: Layout) -> None:
    c = CheckedScheduler((2, 3), layout=layout)
    r = request("a", c.request_tokens - 1, 5)
    c.add(r)
    c.run()
    assert c.outputs.tokens["a"] == expected_tokens(r)[:1] and c.outputs.error["a"]


def test_the_models_context_ends_a_request_without_an_error() -> None:
    c = CheckedScheduler((64,), max_context=12)
    c.add(request("a", 5, 1000))
    c.run()
    assert len(c.outputs.tokens["a"]) == 7
    assert c.outputs.finish["a"] is FinishReason.LENGTH and c.outputs.error["a"] is None


# How requests end


def _prompt_leading_to(token: int) -> tuple[int, ...]:
    """A prompt whose third new token is the first to be `token`."""
    for first in range(10_000):
        prompt = (first % VOCAB, first // VOCAB % VOCAB, 5)
        out = expected_tokens(request("a", prompt, 3, seed=1))
        if out.index(token) == 2 if token in out else False:
            return prompt
    raise AssertionError(token)


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_end_of_text_stop_ids_and_ignoring_the_first(plans_in_flight: int) -> None:
    c = CheckedScheduler(plans_in_flight=plans_in_flight)
    eos, other = _prompt_leading_to(EOS), _prompt_leading_to(50)
    c.add(
        request("eos", eos, 9, seed=1, ignore_eos=False),
        request("ignored", eos, 9, seed=1),
        request("stop", other, 9, seed=1, stop_token_ids=(50,)),
        request("both", eos, 9, seed=1, stop_token_ids=(EOS,)),
        request("last", other, 3, seed=1, stop_token_ids=(50,)),
    )
    c.run()
    out = c.outputs
    assert {name: (len(out.tokens[name]), out.finish[name].value) for name in out.tokens} == {
        "eos": (3, "stop"),
        "ignored": (9, "length"),
        "stop": (3, "stop"),
        "both": (3, "stop"),
        "last": (3, "stop"),
    }
    assert out.tokens["eos"][-1] == EOS and out.tokens["stop"][-1] == 50


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_one_token_takes_one_row_and_no_decode(plans_in_flight: int) -> None:
    c = CheckedScheduler(plans_in_flight=plans_in_flight)
    r = request("a", 4, 1)
    c.add(r)
    c.run()
    assert c.outputs.tokens["a"] == expected_tokens(r) and c.outputs.finish["a"] is FinishReason.LENGTH
    assert len(c.plans) == 1


def test_a_deadline_ends_a_request_on_the_callers_clock() -> None:
    c = CheckedScheduler()
    c.add(request("late", 4, 100, deadline_s=5.0), request("free", 4, 20), now=100.0)
    for _ in range(6):
        c.step(now=104.9)
    assert "late" not in c.outputs.finish and len(c.outputs.tokens["late"]) >= 4
    c.step(now=105.0)
    assert c.outputs.finish["late"] is FinishReason.CANCELLED and "deadline_s" in (c.outputs.error["late"] or "")
    c.run()
    assert len(c.outputs.tokens["free"]) == 20


def test_higher_priority_first_then_arrival() -> None:
    c = CheckedScheduler(max_running=1)
    for name, priority in (("a", 0), ("b", 1), ("c", 0), ("d", 1)):
        c.add(request(name, 4, 2, priority=priority))
    c.run()
    assert list(c.outputs.finish) == ["b", "d", "a", "c"]


def test_preempted_are_the_most_junior() -> None:
    c = CheckedScheduler((6,))
    c.add(request("low", 4, 12, priority=-1), request("old", 4, 12), request("new", 4, 12))
    c.run()
    assert c.preemptions > 0
    assert list(c.outputs.finish) == ["old", "new", "low"]


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_a_preempted_request_goes_elsewhere_only_with_all_its_tokens(plans_in_flight: int) -> None:
    """Another rank has room for it at once, while the token of its last row is still on its way."""
    c = CheckedScheduler((5, 12), layout=Layout.DOP, plans_in_flight=plans_in_flight)
    stays, ends, moves = request("stays", 4, 14), request("ends", 24, 2), request("moves", 4, 14)
    c.add(stays, ends, moves)
    c.run()
    (where,) = {tuple(p.home[p.start == 0].tolist()) for p in c.plans[:1]}
    assert where == (0, 1, 0) and c.preemptions == 1, "the situation did not arise"
    assert any((p.home[p.count > 1] == 1).any() for p in c.plans[2:]), "it did not go elsewhere"
    for r in (stays, ends, moves):
        assert c.outputs.tokens[r.id] == expected_tokens(r)


# Log-probabilities of prompts


@pytest.mark.parametrize("plans_in_flight", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompt_logprobs_once_each_and_in_order(layout: Layout, plans_in_flight: int) -> None:
    """Across chunks (5 tokens a step), and across preemption in the middle of the prompt and after it."""
    c = CheckedScheduler(
        (6, 6), layout=layout, plans_in_flight=plans_in_flight, max_batch_tokens=5, max_running=4
    )
    senior = [request(f"s{i}", 4, 14, priority=1) for i in range(2)]
    scored = [
        request(f"p{i}", tuple(range(i, i + length)), 6, prompt_logprobs=2, logprobs=1)
        for i, length in enumerate((1, 2, 9, 13))
    ]
    c.add(*senior, *scored)
    c.run()
    for r in scored:
        found = [entry for delta in c.outputs.deltas[r.id] for entry in delta.prompt_logprobs]
        assert [entry.token for entry in found] == list(r.prompt[1:])
        expected = [logprob(r.prompt[:i], r.prompt[i]) for i in range(1, len(r.prompt))]
        assert [entry.logprob for entry in found] == expected
        assert all(len(entry.top) == 2 for entry in found)
        chosen = [entry for delta in c.outputs.deltas[r.id] for entry in delta.logprobs]
        assert [entry.token for entry in chosen] == c.outputs.tokens[r.id] == expected_tokens(r)
        assert all(len(entry.top) == 1 for entry in chosen)


def test_a_prompt_preempted_half_way_is_scored_once() -> None:
    c = CheckedScheduler((6,), max_batch_tokens=3, max_running=2)
    senior = request("senior", 4, 16, priority=1)
    scored = request("scored", 12, 2, prompt_logprobs=0)
    c.add(senior, scored)
    c.run()
    starts = [int(p.start[row]) for p in c.plans for row in range(p.num_rows) if p.count[row] > 1]
    assert c.preemptions > 0 and starts.count(0) > 2, "the situation did not arise"
    found = [entry.token for delta in c.outputs.deltas["scored"] for entry in delta.prompt_logprobs]
    assert found == list(scored.prompt[1:])


# Cancelling, in every state


def _steps_until(c: CheckedScheduler, reached: Any, limit: int = 100) -> None:
    for _ in range(limit):
        if reached():
            return
        c.step()
    raise AssertionError("the state to cancel in was never reached")


STATES = ["waiting", "prefilling", "decoding", "preempted"]


@pytest.mark.parametrize("plans_in_flight", [1, 2])
@pytest.mark.parametrize("state", STATES)
def test_cancel_and_use_the_id_again(state: str, plans_in_flight: int) -> None:
    """With two plans in flight, rows of the cancelled request are on their way in all states but the first."""
    c = CheckedScheduler((7,), plans_in_flight=plans_in_flight, max_running=2, max_batch_tokens=6)
    senior = request("senior", 4, 16, priority=1)
    victim = request("victim", 14, 5)
    c.add(senior)
    if state == "waiting":
        c.add(request("other", 4, 9, priority=1))
    c.step()
    c.add(victim)

    def in_state() -> bool:
        prefills = sum(int(p.count[row]) for p in c.plans for row in range(p.num_rows) if p.count[row] > 1)
        return {
            "waiting": c.scheduler.num_waiting == 1 and len(c.plans) > 2,
            "prefilling": 4 < prefills < 4 + 14,
            "decoding": bool(c.outputs.tokens.get("victim")),
            "preempted": c.scheduler.num_waiting == 1 and prefills > 4,
        }[state]

    _steps_until(c, in_state)
    c.cancel("victim")
    assert c.outputs.finish["victim"] is FinishReason.CANCELLED
    assert c.scheduler.cancel("victim") is None, "cancelled twice"
    assert len(c.outputs.tokens["victim"]) < 5
    c.outputs.forget("victim")
    again = request("victim", (8, 9, 10), 4, seed=5)
    c.add(again)
    c.run()
    assert c.outputs.tokens["victim"] == expected_tokens(again)
    assert c.outputs.tokens["senior"] == expected_tokens(senior)


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_pages_of_a_cancelled_request_come_back_without_a_new_arrival(plans_in_flight: int) -> None:
    c = CheckedScheduler((8,), plans_in_flight=plans_in_flight)
    c.add(request("a", 20, 9))
    for _ in range(3):
        c.step()
    c.cancel("a")
    for _ in range(plans_in_flight):
        c.step()
    assert c.scheduler.directory.free_pages().tolist() == [8] and c.idle
    c.scheduler.check_idle()


def test_cancelling_nobody_does_nothing() -> None:
    c = CheckedScheduler()
    assert c.scheduler.cancel("nobody") is None
    assert c.step() is None
    c.scheduler.check_idle()


def test_a_row_on_its_way_when_its_request_ends_is_dropped() -> None:
    """Plan n + 1 was made before plan n's result ended the request: its token is nobody's."""
    c = CheckedScheduler(plans_in_flight=2)
    prompt = _prompt_leading_to(50)
    c.add(request("a", prompt, 9, seed=1, stop_token_ids=(50,)))
    c.run()
    sampled = sum(int((p.want_target == SAMPLE).sum()) for p in c.plans)
    assert sampled == 4 and len(c.outputs.tokens["a"]) == 3
    assert next_token(1, prompt) == c.outputs.tokens["a"][0]
