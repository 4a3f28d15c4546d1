"""Whatever arrives, is cancelled or runs out of room: every request gets the tokens of a run of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splash_trt.config import Layout
from splash_trt.plan import encode
from splash_trt.request import FinishReason, Request
from tests.oracles.checked_scheduler import EOS, CheckedScheduler, request
from tests.oracles.simulated_ranks import VOCAB, expected_tokens

BUSY = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@dataclass
class Traffic:
    """A deployment and what happens to it: before step i, arrivals[i] come and cancels[i] go."""

    pages: tuple[int, ...]
    options: dict[str, int]
    layout: Layout
    arrivals: dict[int, list[Request]] = field(default_factory=dict)
    cancels: dict[int, list[str]] = field(default_factory=dict)

    @property
    def requests(self) -> list[Request]:
        return [r for _, group in sorted(self.arrivals.items()) for r in group]


@st.composite
def traffic(draw: st.DrawFn, *, cancels: bool = True) -> Traffic:
    num_ranks = draw(st.integers(1, 4))
    pages = tuple(draw(st.integers(2, 8)) for _ in range(num_ranks))
    running = draw(st.integers(1, 6))
    options = {
        "page_tokens": draw(st.sampled_from([1, 2, 4])),
        "max_running": running,
        "max_batch_tokens": running + draw(st.integers(0, 12)),
        "plans_in_flight": draw(st.integers(1, 2)),
    }
    found = Traffic(pages, options, draw(st.sampled_from(list(Layout))))
    longest = CheckedScheduler(pages, layout=found.layout, **options).request_tokens - 1
    for index in range(draw(st.integers(1, 10))):
        prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=max(1, longest)))
        deadline = draw(st.sampled_from([None, None, 3.0, 15.0])) if cancels else None
        r = request(
            f"r{index}",
            tuple(prompt),
            draw(st.integers(1, 24)),
            priority=draw(st.sampled_from([0, 0, 0, 2])) if cancels else 0,
            deadline_s=deadline,
            ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.sampled_from([(), tuple(range(10, 20))])),
            prompt_logprobs=draw(st.sampled_from([None, 0])),
        )
        if len(prompt) <= longest:
            found.arrivals.setdefault(draw(st.integers(0, 30)), []).append(r)
            if cancels and draw(st.integers(0, 3)) == 0:
                found.cancels.setdefault(draw(st.integers(0, 60)), []).append(r.id)
    return found


def _run(t: Traffic) -> CheckedScheduler:
    c = CheckedScheduler(t.pages, layout=t.layout, **t.options)
    for step in range(61):
        c.add(*t.arrivals.get(step, []), now=float(step))
        for name in t.cancels.get(step, []):
            c.cancel(name)
        c.step(now=float(step))
    c.run(_bound(c, t.requests))
    return c


def _bound(c: CheckedScheduler, requests: list[Request]) -> int:
    """Steps that are enough if some request that never gives way again always goes on.

    A chunk takes what the decodes leave of a step; twice the plans in flight pass until freed pages are seen.
    """
    room = c.config.max_batch_tokens - c.config.max_running + 1
    work = sum(-(-c.limit(r) // room) + r.sampling.max_tokens + 1 for r in requests)
    return 10 + 2 * (c.config.plans_in_flight + 1) * work


@BUSY
@given(traffic())
def test_every_request_gets_the_tokens_of_a_run_of_its_own(t: Traffic) -> None:
    c = _run(t)
    for r in t.requests:
        alone = expected_tokens(r, eos=(EOS,), limit=c.limit(r))
        got = c.outputs.tokens[r.id]
        if c.outputs.finish[r.id] is FinishReason.CANCELLED:
            assert got == alone[: len(got)]
            assert r.deadline_s is not None or any(r.id in names for names in t.cancels.values())
            continue
        assert got == alone
        capped = len(r.prompt) + len(got) == c.request_tokens < len(r.prompt) + r.sampling.max_tokens
        if c.outputs.finish[r.id] is FinishReason.LENGTH:
            assert (c.outputs.error[r.id] is not None) == capped
        scored = [entry.token for delta in c.outputs.deltas[r.id] for entry in delta.prompt_logprobs]
        assert scored == ([] if r.sampling.prompt_logprobs is None else list(r.prompt[1:]))


@settings(BUSY, max_examples=25)
@given(traffic())
def test_the_same_input_makes_the_same_plans(t: Traffic) -> None:
    assert [encode(p) for p in _run(t).plans] == [encode(p) for p in _run(t).plans]


@settings(BUSY, max_examples=60)
@given(traffic(cancels=False))
def test_no_request_is_overtaken_at_its_first_admission(t: Traffic) -> None:
    """Equal priorities: cache is first given in the order of arrival."""
    c = _run(t)
    first_seen: list[int] = []
    for plan in c.plans:
        first_seen += [seed for seed in plan.sampling["seed"].tolist() if seed not in first_seen]
    assert first_seen == [r.seed for r in t.requests]


@settings(BUSY, max_examples=40)
@given(traffic(cancels=False), st.integers(0, 60))
def test_nothing_is_left_of_cancelled_requests(t: Traffic, at: int) -> None:
    """All are cancelled at a random moment; the steps in flight later, all pages and slots are free again."""
    c = CheckedScheduler(t.pages, layout=t.layout, **t.options)
    for step in range(at):
        c.add(*t.arrivals.get(step, []))
        c.step()
    for names in (r.id for step, group in t.arrivals.items() if step < at for r in group):
        c.cancel(names)
    for _ in range(c.config.plans_in_flight):
        c.step()
    assert c.idle
    c.scheduler.check_idle()
