"""Runs of the real scheduler and orchestrator on simulated ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from splash_trt.config import EngineConfig, Layout
from splash_trt.memory.map import memory_map, model_sizes, request_tokens
from splash_trt.models.config import ModelConfig
from splash_trt.models.planning import load_for_planning
from splash_trt.orchestrator import Orchestrator
from splash_trt.plan import Plan, StepResult
from splash_trt.request import Request, SamplingParams
from splash_trt.scheduler.batch import Batch
from splash_trt.scheduler.cost_model import CostModel
from splash_trt.scheduler.devices import load_device
from splash_trt.scheduler.load import Load
from splash_trt.scheduler.policy import Decision
from splash_trt.scheduler.scheduler import Scheduler
from splash_trt.simulate import run as runs
from splash_trt.simulate.adversary import Adversary
from splash_trt.simulate.clock import SimulatedClock
from splash_trt.simulate.compare import Comparison, compare, configs
from splash_trt.simulate.engine import SimulatedEngine, plain_price
from splash_trt.simulate.generators import make
from splash_trt.simulate.outcome import AUTO, CEILING, Outcome
from splash_trt.simulate.report import text
from splash_trt.simulate.run import ceiling, simulate
from splash_trt.simulate.source import TraceSource
from splash_trt.simulate.tally import MAX_SAMPLES, Series, Tally
from splash_trt.simulate.traces import NOT_AFTER, Trace, joined

RANKS = 4
PAGE = 16
STEP_S = 0.01


class FakeCost:
    """TP is fast for few tokens, DP for many, CP for prompts."""

    def step_s(self, batch: Batch) -> float:
        n, moved = batch.num_tokens, batch.moved_bytes * 1e-10
        prefill = float(batch.prefill_tokens.sum())
        each = {Layout.TP: (0.5, 0.03), Layout.DP: (0.7, 0.004), Layout.CP: (0.9, 0.01), Layout.DOP: (0.8, 0.005)}
        base, token = each[batch.layout]
        return STEP_S * (base + token * n + (0.0 if batch.layout is Layout.CP else 0.01 * prefill)) + moved


class Crowds:
    """A policy that needs no cost model: DP for more than `many` requests, TP for fewer."""

    def __init__(self, many: int = 8) -> None:
        self._many = many

    def observe(self, plan: Plan, result: StepResult) -> None: ...

    def wants_to_look(self, *load: object) -> bool:
        return True

    def decide(self, load: Load) -> Decision | None:
        wanted = Layout.DP if load.running + load.waiting > self._many else Layout.TP
        return None if wanted is load.layout or load.is_idle else Decision(wanted, "counted")

    def resume(self) -> None: ...

    def expected_s(self, plan: Plan) -> float:
        return FakeCost().step_s(Batch.of(plan, RANKS))

    def explain(self) -> dict[str, object]:
        return {}


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return load_for_planning(Path(__file__).parents[2] / "models" / "splash-tiny")[0]


def config_of(model: ModelConfig, *, pages: int = 200, **fields: object) -> EngineConfig:
    """A cache of about `pages` pages a rank where it is smallest."""
    values: dict = dict(num_ranks=RANKS, dtype="float32", page_tokens=PAGE, max_batch_tokens=256, max_running=32)
    values |= dict(layout=Layout.TP, layouts=tuple(Layout)) | fields
    config = EngineConfig(**values)
    sizes = [memory_map(model, config, rank) for rank in range(config.num_ranks)]
    need = max(m.workspace_bytes + m.own_bytes + m.others_bytes + 256 for m in sizes)
    return dataclasses.replace(config, memory_bytes=need + pages * sizes[0].page_bytes)


def served(model: ModelConfig, config: EngineConfig, trace: Trace, policy: Crowds | None = None) -> Outcome:
    return simulate(model, config, FakeCost(), TraceSource(trace), label="x", policy=policy)


def phases() -> Trace:
    few = make("reasoning:requests=4,prompt_tokens=30,output_median=200,output_sigma=0.1,clients=2", 1)
    many = make("rollouts:prompts=6,samples=4,prompt_tokens=40,output_median=60,output_sigma=0.5", 2)
    assert isinstance(few, Trace) and isinstance(many, Trace)
    return joined("phases", [few, many, few], in_turn=True)


def test_the_same_seed_gives_the_same_bytes(model: ModelConfig) -> None:
    config = config_of(model)
    first = served(model, config, phases(), Crowds()).to_bytes()
    assert first == served(model, config, phases(), Crowds()).to_bytes()
    assert first != served(model, config, phases(), Crowds(many=12)).to_bytes()


class Recorder:
    """Lengths of what a run's requests got, and the clock at each delta."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: dict[str, int] = {}
        self.finish: dict[str, str] = {}
        self.times: list[float] = []
        self.most = 0.0
        outer = self

        class Watched(Orchestrator):
            def turn(self):  # type: ignore[no-untyped-def]
                turn = super().turn()
                outer.times.append(self._clock())
                directory = self.scheduler.directory
                directory.check()
                outer.most = max(outer.most, float((directory.live_pages() / directory.limits()).max()))
                for delta in turn.deltas:
                    assert delta.request_id not in outer.finish
                    outer.tokens[delta.request_id] = outer.tokens.get(delta.request_id, 0) + len(delta.tokens)
                    if delta.finish is not None:
                        outer.finish[delta.request_id] = delta.finish.value
                return turn

        monkeypatch.setattr(runs, "Orchestrator", Watched)


@pytest.mark.parametrize("pages", [40, 400])
@pytest.mark.parametrize("name", ["auto", "tp", "dp", "cp", "dop"])
def test_every_request_gets_exactly_its_length_within_the_cache(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch, name: str, pages: int
) -> None:
    recorder = Recorder(monkeypatch)
    config = configs(config_of(model, pages=pages), ["auto", "tp", "dp", "cp", "dop"])[name]
    trace, _ = phases().clipped(request_tokens(model, config))
    outcome = served(model, config, trace, Crowds() if name == "auto" else None)
    lengths = [recorder.tokens[str(number)] for number in range(trace.num_requests)]
    assert lengths == trace.output_tokens.tolist()
    assert set(recorder.finish.values()) == {"stop"}  # by end-of-text, never by a limit
    assert recorder.times == sorted(recorder.times)
    assert 0.02 < recorder.most <= 1.0
    assert outcome.output_tokens == trace.output_tokens.sum()


def test_a_small_cache_makes_requests_wait_and_come_back(model: ModelConfig) -> None:
    trace = make("rollouts:prompts=8,samples=4,prompt_tokens=60,output_median=200,output_sigma=0.6", 4)
    assert isinstance(trace, Trace)
    tight = configs(config_of(model, pages=40), ["tp"])["tp"]
    trace, _ = trace.clipped(request_tokens(model, tight))
    roomy = configs(config_of(model, pages=2000), ["tp"])["tp"]
    small, large = served(model, tight, trace), served(model, roomy, trace)
    assert small.recomputed > 0 and large.recomputed == 0
    assert small.makespan_s > large.makespan_s
    assert small.output_tokens == large.output_tokens


def test_a_closed_loop_in_order(model: ModelConfig) -> None:
    chain = Trace.open(
        "chain", np.array([0.5, 2.0, 1.0]), np.full(3, 10), np.array([5, 7, 3]), after=np.array([NOT_AFTER, 0, 1])
    )
    outcome = served(model, configs(config_of(model), ["tp"])["tp"], chain)
    # The pauses are there, and each request had the server to itself.
    assert outcome.makespan_s == pytest.approx(0.5 + 2.0 + 1.0 + outcome.latency_s.sum())
    assert outcome.tpot_s == pytest.approx(STEP_S * 0.53)


def test_switches_are_recorded(model: ModelConfig) -> None:
    outcome = served(model, config_of(model, pages=2000), phases(), Crowds())
    done = [(r.source, r.target) for r in outcome.switches if r.outcome == "committed"]
    assert ("tp", "dp") in done and ("dp", "tp") in done
    assert outcome.num_switches == len(outcome.switches)
    for record in outcome.switches:
        assert record.why == "counted" and record.begin_step >= 0
    brought = next(r for r in outcome.switches if (r.source, r.target) == ("tp", "dp"))
    assert brought.bytes_between_ranks["weights"] > 0 and brought.stall_s is not None
    assert outcome.layout_share["tp"] > 0 and outcome.layout_share["dp"] > 0
    assert sum(outcome.layout_share.values()) == pytest.approx(1)
    times, layouts = zip(*outcome.layout_changes, strict=True)
    assert list(times) == sorted(times) and layouts[0] == Layout.TP and Layout.DP in layouts


def test_plans_take_their_time_one_after_the_other(model: ModelConfig) -> None:
    """Two plans on their way: the second begins when the first ends, and a result comes when its plan ends."""
    config = configs(config_of(model), ["tp"])["tp"]
    clock, sizes = SimulatedClock(), model_sizes(model, config)
    source = TraceSource(Trace.open("one", np.zeros(1), np.array([20]), np.array([9])))
    engine = SimulatedEngine(config, sizes, plain_price(FakeCost(), RANKS), clock, source)
    scheduler = Scheduler(
        config, sizes=sizes, request_tokens=1000, vocab_size=model.vocab_size, max_context=1000, eos_token_ids=()
    )
    scheduler.add(Request(id="0", prompt=(1,) * 20, sampling=SamplingParams(max_tokens=50, seed=0)))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert first is not None and second is not None
    results = [engine.execute(first), engine.execute(second)]
    assert clock.now == 0
    done = results[0]()
    assert clock.now == done.seconds == pytest.approx(STEP_S * (0.5 + 0.03 * 20 + 0.01 * 20))
    assert results[1]().seconds == pytest.approx(STEP_S * 0.53)
    assert clock.now == pytest.approx(STEP_S * (0.5 + 0.8 + 0.53))
    assert done.token.tolist() == [1] and done.statuses == ()


def test_what_is_reckoned_by_hand() -> None:
    """Two requests: tokens of the first at 1, 2 and 4, of the second at 2 and 5."""
    prompt, output = np.array([10, 20]), np.array([3, 2])
    tally = Tally(prompt, output)
    for time, tokens in ((1.0, [(0, 10)]), (2.0, [(0, 11), (1, 20)]), (4.0, [(0, 12)]), (5.0, [(0, 13), (1, 21)])):
        numbers, ends = zip(*tokens, strict=True)
        tally.step(time, np.array(numbers), np.array(ends))
    tally.flush()
    assert tally.first_s.tolist() == [1.0, 2.0] and tally.last_s.tolist() == [4.0, 5.0]
    assert tally.longest_gap_s == 3.0
    assert tally.gap_s(30) == pytest.approx(1.0, rel=0.005)
    assert tally.gap_s(50) == pytest.approx(2.0, rel=0.005)
    assert tally.gap_s(99) == pytest.approx(3.0, rel=0.005)


def test_percentiles_by_hand() -> None:
    outcome = Outcome(
        label="tp", makespan_s=10.0, prompt_tokens=4, output_tokens=50, ttft_s=np.array([1.0, 2.0, 3.0]),
        tpot_s=np.array([0.1, np.nan, 0.3]), latency_s=np.array([2.0, 4.0, 9.0]), gap_p50_s=0.1, gap_p99_s=0.2,
        gap_max_s=0.3, steps=5, recomputed=0, layout_share={"tp": 1.0}, num_switches=0, switches=(),
        layout_changes=((0.0, 0),), series=Series(),
    )  # fmt: skip
    summary = outcome.summary()
    assert summary["output_tokens_per_s"] == 5.0
    assert summary["ttft_p50_s"] == 2.0 and summary["ttft_p99_s"] == pytest.approx(2.98)
    assert summary["tpot_p50_s"] == pytest.approx(0.2) and summary["tpot_mean_s"] == pytest.approx(0.2)
    assert summary["latency_mean_s"] == 5.0 and summary["latency_p90_s"] == pytest.approx(8.0)
    assert outcome.worst_stall_s == 0.0


def test_a_series_stays_short() -> None:
    series, taken = Series(), 0
    for step in range(1, 20_001):
        if step % series.every == 0:
            series.add(float(step), 0, step, 0, 1, 0, 0.5)
            taken += 1
    assert series.every == 8 and len(series.time_s) < MAX_SAMPLES and taken < 2.5 * MAX_SAMPLES
    assert series.time_s == sorted(series.time_s) and series.output == [int(t) for t in series.time_s]


def compared(model: ModelConfig, load: Trace | Adversary, **fields: int) -> Comparison:
    base = config_of(model, pages=2000, **fields)
    return compare(model, base, FakeCost(), load, ["auto", "tp", "dp", "dop"], lambda _: Crowds())


def test_auto_wins_where_phases_differ_and_nobody_beats_the_ceiling(model: ModelConfig) -> None:
    found = compared(model, phases())
    by = {outcome.label: outcome for outcome in found.outcomes}
    assert list(by) == [AUTO, "tp", "dp", "dop", CEILING]
    for label in (AUTO, "tp", "dp", "dop"):
        assert by[CEILING].makespan_s <= by[label].makespan_s
    assert by[AUTO].makespan_s < min(by[label].makespan_s for label in ("tp", "dp", "dop"))
    assert found.speedups()["tp"]["makespan"] > 1 > found.speedups()[CEILING]["makespan"]
    assert {"tp", "dp"} <= set(by[CEILING].layout_share)
    shown = text(found)
    for part in ("auto against dp", "of the ceiling's speed", "no prefix cache", "tp -> dp, committed"):
        assert part in shown


def test_an_adversary_flips_and_the_others_get_the_same_work(model: ModelConfig) -> None:
    foe = Adversary(1, requests=150, few=2, many=24, prompt_tokens=20, long_output=150, short_output=20)
    found = compared(model, foe)
    assert foe.flips >= 2
    assert len({outcome.output_tokens for outcome in found.outcomes}) == 1
    assert all(len(outcome.latency_s) == 150 for outcome in found.outcomes)


def test_the_ceiling_goes_by_the_roomiest_cache(model: ModelConfig) -> None:
    outcome = ceiling(model, config_of(model), FakeCost(), TraceSource(phases()))
    assert outcome.switches == () and outcome.label == CEILING
    assert outcome.layout_share["tp"] > 0.3


@pytest.mark.nightly
def test_many_ranks_and_requests(model: ModelConfig) -> None:
    trace = make("rollouts:prompts=12500,samples=8,prompt_tokens=64,output_median=60,output_max=800", 1)
    assert isinstance(trace, Trace)
    config = configs(config_of(model, num_ranks=64, max_batch_tokens=4096, max_running=2048, pages=2000), ["dp"])["dp"]
    outcome = served(model, config, trace)
    assert len(outcome.latency_s) == 100_000 and outcome.output_tokens == trace.output_tokens.sum()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_layout_beats_the_ceiling_by_more_than_a_hair(model: ModelConfig, seed: int) -> None:
    load = make("random:phases=2,size=0.1,room_tokens=20000", seed)
    base = config_of(model, pages=600, max_batch_tokens=512)
    cost = CostModel(model, base, load_device("h200"))
    found = compare(model, base, cost, load, ["auto", "tp", "dp", "cp", "dop"], lambda _: Crowds())
    *others, best = found.outcomes
    assert best.label == CEILING
    for outcome in others:
        # More requests at once can end the last one later: see run.ceiling.
        assert best.makespan_s <= 1.03 * outcome.makespan_s, outcome.label
