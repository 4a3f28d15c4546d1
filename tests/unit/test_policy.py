"""Which layouts loads lead to, by the cost model of DeepSeek-V3.2 on eight H200; the policy does not oscillate."""

from __future__ import annotations

import dataclasses
import json
import math

import msgspec
import numpy as np
import pytest

from splash_trt.config import EngineConfig, Formats, Layout
from splash_trt.memory.map import capacity, model_sizes
from splash_trt.scheduler.batch import Batch
from splash_trt.scheduler.compare import Comparer, Goal, Objective
from splash_trt.scheduler.cost_model import CostModel
from splash_trt.scheduler.devices import BUILT_IN
from splash_trt.scheduler.estimator import Estimator, level
from splash_trt.scheduler.forecast import Arriving, halves
from splash_trt.scheduler.load import Load
from splash_trt.scheduler.phases import Prompts, homes_under, phases_of
from splash_trt.scheduler.policy import LOOK_S, LOOKS, MAX_DOUBT, QUIET_LOOK_S, CostPolicy, Decision
from tests.oracles.published_configs import V32, parse

N = 8
MODEL = parse(V32)
H200 = BUILT_IN["h200"]
CONFIG = EngineConfig(
    num_ranks=N,
    layouts=tuple(Layout),
    dtype="bfloat16",
    formats=Formats(weights="fp8", attention="bfloat16", cache="fp8"),
    memory_bytes=int(0.9 * H200.memory_bytes),
    max_batch_tokens=16384,
    max_running=2048,
    migration_bytes=130_000_000,
    migration_max_slowdown=0.005,
)
ROOM = {layout: capacity(MODEL, CONFIG, layout).total_tokens for layout in Layout}
SIZES = model_sizes(MODEL, CONFIG)
COST = CostModel(MODEL, CONFIG, H200)
NOTHING = Arriving(0.0, 0.0, (), 0.0)


def load(layout: Layout = Layout.TP, running: int = 1, context: int = 2000, **changes: object) -> Load:
    """Requests that are alike, with 500 tokens of output to come."""
    pages = running * context // CONFIG.page_tokens
    replicated = layout is Layout.TP
    base = Load(
        now=0.0,
        layout=layout,
        num_ranks=N,
        held=np.full(running, context),
        prefill=np.zeros(running, np.int64),
        generated=np.full(running, 100),
        left=np.full(running, 500.0),
        home=np.zeros(running, np.int64) if replicated else np.arange(running) % N,
        slots=np.arange(running),
        waiting_prompts=np.zeros(0, np.int64),
        waiting_left=500.0,
        arriving=NOTHING,
        used_pages=np.full(N, pages if replicated else pages // N),
        budget_bytes=CONFIG.migration_bytes,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def long_prompt(layout: Layout = Layout.TP) -> Load:
    return load(layout, running=1, context=0, prefill=np.array([128_000]), generated=np.array([0]))


def policy(objective: str = "throughput", room: dict[Layout, int] | None = None) -> CostPolicy:
    return CostPolicy(COST, CONFIG, SIZES, room or ROOM, Objective.parse(objective))


def settled(load: Load, chosen: CostPolicy | None = None, looks: int = 5) -> Layout:
    """Where a policy ends that sees the same load again and again, its decisions carried out at once."""
    chosen = chosen or policy()
    layout, now = load.layout, 1000.0
    for _ in range(looks):
        now += 5.0
        seen = dataclasses.replace(load, now=now, layout=layout)
        if layout is not load.layout:
            seen = dataclasses.replace(seen, home=homes_under(layout, load))
        decision = chosen.decide(seen)
        layout = decision.layout if decision is not None else layout
    return layout


def decided(chosen: CostPolicy, load: Load) -> Decision | None:
    """Within the looks that a small gain takes, a tenth of a second apart."""
    decision = None
    for look in range(LOOKS):
        decision = decision or chosen.decide(dataclasses.replace(load, now=load.now + look / 10))
    return decision


class TestWhereLoadsLead:
    @pytest.mark.parametrize("start", list(Layout))
    def test_few_requests_to_tp(self, start: Layout) -> None:
        assert settled(load(start, running=2, left=np.full(2, 5000.0))) is Layout.TP

    @pytest.mark.parametrize("start", list(Layout))
    def test_a_crowd_to_dp(self, start: Layout) -> None:
        assert settled(load(start, running=800, context=1000)) is Layout.DP

    @pytest.mark.parametrize("start", [Layout.TP, Layout.DP, Layout.DOP])
    def test_a_lone_long_prompt_to_cp(self, start: Layout) -> None:
        assert settled(long_prompt(start), looks=1) is Layout.CP

    def test_a_crowd_that_the_cache_limits_to_dop(self) -> None:
        """One that fits DP stays there; one that waits for room goes where there is more."""
        few = {"running": 500, "context": 6000, "left": np.full(500, 2000.0)}
        assert settled(load(Layout.DP, **few)) is Layout.DP  # type: ignore[arg-type]
        held = np.full(500, ROOM[Layout.DP] // 505)
        crowd = {**few, "held": held, "waiting_prompts": np.full(400, 500), "waiting_left": 9000.0}
        assert settled(load(Layout.DP, **crowd)) is Layout.DOP  # type: ignore[arg-type]

    def test_no_layout_without_room_for_what_is_held(self) -> None:
        held = np.full(400, ROOM[Layout.TP] // 300)
        crowd = load(Layout.DP, running=400, held=held, left=np.full(400, 10.0))
        comparison = Comparer(Estimator(COST, CONFIG, ROOM), CONFIG, SIZES, ROOM, Objective()).compare(crowd, 0.03)
        there = {c.layout: c for c in comparison.candidates}
        assert not there[Layout.TP].fits and there[Layout.TP].gain_s == float("-inf")

    def test_no_layout_that_could_not_be_reached_for_lack_of_room(self) -> None:
        """On the way from owners to stripes a rank holds its requests and a part of all others."""
        for share, fits in ((0.3, True), (0.8, False)):
            held = np.full(400, int(share * ROOM[Layout.DP]) // 400)
            crowd = load(Layout.DP, running=400, held=held, waiting_prompts=np.full(20, 64_000))
            comparison = Comparer(Estimator(COST, CONFIG, ROOM), CONFIG, SIZES, ROOM, Objective()).compare(crowd, 0.03)
            assert {c.layout: c.fits for c in comparison.candidates}[Layout.CP] is fits

    def test_only_layouts_that_are_allowed(self) -> None:
        room = {layout: ROOM[layout] for layout in (Layout.TP, Layout.DOP)}
        assert settled(load(running=800, context=1000), policy(room=room)) in room

    def test_a_full_tp_goes_by_way_of_dop(self) -> None:
        chosen = policy()
        crowd = load(running=900, context=ROOM[Layout.TP] // 905)
        assert decided(chosen, crowd) is not None
        explained = {entry["layout"]: entry for entry in chosen.explain(0.0)["candidates"]}  # type: ignore[attr-defined]
        assert explained["dp"]["switch"]["route"] == ["dop", "dp"]

    def test_drifted_owners_are_evened_out(self) -> None:
        home = np.concatenate([np.zeros(60, np.int64), np.arange(340) % N])
        crowd = load(Layout.DP, running=400, context=4000, home=home, left=np.full(400, 5000.0))
        decision = decided(policy(), crowd)
        assert decision is not None and decision.layout is Layout.DP and decision.kind == "owners"
        moved = home.copy()
        for slot, rank in decision.owners.items():
            moved[slot] = rank
        before, after = np.bincount(home, minlength=N), np.bincount(moved, minlength=N)
        assert after.max() < before.max() and after.max() - after.min() <= 4


class TestObjectives:
    def test_parse(self) -> None:
        assert Objective.parse("throughput") == Objective()
        assert Objective.parse("latency") == Objective(goal=Goal.LATENCY)
        assert Objective.parse("bounded:50") == Objective(p99_step_s=0.05)
        for wrong in ("", "fast", "bounded", "bounded:", "bounded:-1", "bounded:nan", "latency:5"):
            with pytest.raises(ValueError, match="objective"):
                Objective.parse(wrong)

    def test_a_bound_rules_out_what_exceeds_it(self) -> None:
        """DP would be best for the crowd's prompts, but its mixed steps are the longer the more it takes in."""
        crowd = load(Layout.DP, running=300, context=3000, waiting_prompts=np.array([60_000]))
        comparer = {
            text: Comparer(Estimator(COST, CONFIG, ROOM), CONFIG, SIZES, ROOM, Objective.parse(text))
            for text in ("throughput", "latency", "bounded:100")
        }
        found = {text: c.compare(crowd, 0.03) for text, c in comparer.items()}
        cost = {text: {c.layout: c.costs[0] for c in comparison.candidates} for text, comparison in found.items()}
        steps = {c.layout: c.times[0].p99_step_s for c in found["throughput"].candidates}
        assert min(cost["latency"], key=cost["latency"].__getitem__) is min(steps, key=steps.__getitem__)
        for layout, step_s in steps.items():
            over = max(step_s / 0.1 - 1, 0)
            assert cost["bounded:100"][layout] == pytest.approx(cost["throughput"][layout] * (1 + 20 * over))


class TestPatience:
    def test_an_idle_server_stays(self) -> None:
        chosen = policy()
        assert chosen.decide(load(running=0)) is None
        assert chosen.explain(0.0)["candidates"] == []

    def test_no_look_before_it_is_time(self) -> None:
        chosen = policy()
        assert chosen.wants_to_look(10.0, 1, 0)
        chosen.decide(load(now=10.0))
        assert not chosen.wants_to_look(10.0 + LOOK_S / 2, 50, 1 << 20)
        assert not chosen.wants_to_look(10.0 + 2 * LOOK_S, 1, CONFIG.max_batch_tokens - 1), "hardly a change"
        assert chosen.wants_to_look(10.0 + 2 * LOOK_S, 1, CONFIG.max_batch_tokens)
        assert chosen.wants_to_look(10.0 + 2 * LOOK_S, 2, CONFIG.max_batch_tokens)
        assert chosen.wants_to_look(10.0 + QUIET_LOOK_S, 2, CONFIG.max_batch_tokens)

    @pytest.mark.parametrize("left, kept", [(100.0, True), (1000.0, False)])
    def test_a_layout_is_kept_for_a_while(self, left: float, kept: bool) -> None:
        """Unless to leave it at once saves more than the time that it is kept for."""
        chosen = policy()
        assert decided(chosen, load(running=800, context=1000, now=10.0)) is not None
        assert (chosen.decide(load(Layout.DP, running=4, left=np.full(4, left), now=10.3)) is None) is kept
        assert ("kept" in str(chosen.explain(0.0)["verdict"])) is kept

    def test_smaller_gains_are_enough_between_layouts_that_are_known(self) -> None:
        """As long as hardly anything comes: what will, nobody knows."""

        def first(known: bool, arriving: Arriving = NOTHING) -> int:
            """The least crowd that leaves TP."""
            cost = CostModel(MODEL, CONFIG, H200)
            for layout in Layout if known else ():
                for _ in range(200):
                    cost.correction.observe(layout, 256.0, 0.01, 0.01)
            for running in range(300, 900, 10):
                chosen = CostPolicy(cost, CONFIG, SIZES, ROOM, Objective())
                seen = load(running=running, context=1000, arriving=arriving)
                if decided(chosen, seen) is not None:
                    return running
            return 900

        some = Arriving(20.0, 2000.0, ((1.0, 100.0),), 20_000.0)
        assert first(known=True) < first(known=False) < 900
        assert first(True, some) == first(False, some) < 900

    def test_loads_that_turn_after_each_change_are_followed_less_and_less(self) -> None:
        chosen, layout, now, changes = policy(), Layout.TP, 0.0, []
        while now < 400:
            now += 1.0
            crowd = layout is Layout.TP
            seen = load(layout, running=800 if crowd else 2, context=1000, now=now)
            decision = chosen.decide(seen)
            if decision is not None:
                layout = decision.layout
                changes.append(now)
        first, last = np.diff(changes)[:3].mean(), np.diff(changes)[-3:].mean()
        assert last > 1.5 * first
        assert chosen.explain(0.0)["doubt"] == MAX_DOUBT
        chosen.resume()  # an operator had the say meanwhile
        assert decided(chosen, load(Layout.TP, running=800, context=1000, now=now + 0.1)) is not None
        assert chosen.explain(0.0)["doubt"] == 1.0

    def test_the_same_looks_give_the_same_answers(self) -> None:
        def answers() -> list[Decision | None]:
            chosen = policy()
            rng = np.random.default_rng(3)
            return [
                chosen.decide(load(Layout(i % 4), running=int(rng.integers(1, 900)), now=float(i))) for i in range(20)
            ]

        first, second = answers(), answers()
        assert first == second and any(first)

    def test_explanations_are_plain_values(self) -> None:
        chosen = policy()
        decision = decided(chosen, load(running=800, context=1000))
        explained = json.loads(json.dumps(chosen.explain(0.0)))
        assert explained["load"]["running"] == 800 and len(explained["candidates"]) == 4
        assert decision is not None and "800 running" in decision.why and "saves" in decision.why


class TestPhases:
    def test_work_is_all_there(self) -> None:
        seen = load(running=3, prefill=np.array([100, 0, 0]), waiting_prompts=np.array([450, 450]))
        first, *rest = phases_of(seen, 0.02)
        (there,) = first.prompts
        assert there.tokens == 1000 and first.tokens == 2 * 500
        (alike,) = there.lengths
        assert alike[0] == 1.0 and alike[1] == pytest.approx((100**2 + 2 * 450**2) / 1000), "but for a tenth"
        assert there.owners == pytest.approx(1000 / (100 / N + 900 / 2))
        assert len(rest) == 3 and not any(later.prompts for later in rest)
        alive = [float(phase.alive.sum()) * phase.presence for phase in rest]
        assert alive == sorted(alive, reverse=True)

    def test_prompts_side_by_side_take_as_long_as_their_steps_do(self) -> None:
        """The owner that is farthest in its prompt is waited for."""
        rng = np.random.default_rng(1)
        prompts = np.rint(14_000 * np.exp(rng.normal(0, 0.6, 48))).astype(np.int64)
        queue = load(Layout.DP, running=0, waiting_prompts=prompts)
        (phase,) = phases_of(queue, 0.02)
        found = Estimator(COST, CONFIG, ROOM).time(phase, Layout.DP, np.zeros(0, np.int64))
        share, steps = CONFIG.max_batch_tokens / N, []
        for _ in range(50):
            whole = rng.choice(prompts, N, p=prompts / prompts.sum())
            start = np.floor(rng.uniform(0, whole))
            end = start + share
            batch = Batch(
                layout=Layout.DP,
                decode_tokens=np.zeros(N),
                decode_context=np.zeros(N),
                prefill_tokens=np.full(N, share),
                prefill_pairs=share * (start + end) / 2,
                prefill_context=end,
                sampled=1,
            )
            steps.append(COST.step_s(batch))
        assert found.p99_step_s == pytest.approx(np.mean(steps), rel=0.1)

    def test_prompts_that_arrive_faster_than_one_owner_computes_them_are_shared(self) -> None:
        def tokens_s(arriving_s: float) -> float:
            seen = load(Layout.DP, running=8, arriving=Arriving(arriving_s / 15e3, arriving_s, ((1.0, 15e3),), 1e9))
            phase = phases_of(seen, 0.02)[1]
            found = Estimator(COST, CONFIG, ROOM).time(phase, Layout.DP, homes_under(Layout.DP, seen))
            return phase.prompts[0].tokens / found.seconds

        assert tokens_s(40e3) > 3 * tokens_s(2e3)

    def test_a_queue_is_served_in_its_order(self) -> None:
        """Documents that came before short prompts are not computed beside them."""
        documents, short = np.full(60, 13_000), np.full(600, 1_000)

        def groups(*prompts: np.ndarray) -> list[Prompts]:
            (phase,) = phases_of(load(Layout.DP, running=0, waiting_prompts=np.concatenate(prompts)), 0.02)
            return list(phase.prompts)

        def seconds(*prompts: Prompts) -> float:
            (phase,) = phases_of(load(Layout.DP, running=0, waiting_prompts=short), 0.02)
            phase = msgspec.structs.replace(phase, tokens=0.0, prompts=prompts)
            return Estimator(COST, CONFIG, ROOM).time(phase, Layout.DP, np.zeros(0, np.int64)).seconds

        found = groups(documents, short)
        assert [some.lengths for some in found] == [((1.0, 13_000.0),), ((1.0, 1_000.0),)]
        assert [some.tokens for some in found] == [60 * 13_000, 600 * 1_000]
        assert [some.waiting for some in found] == [60, 600]
        assert seconds(*found) == pytest.approx(sum(map(seconds, found)))
        (mixed,) = groups(np.tile([13_000, *[1_000] * 10], 60))
        assert seconds(mixed) > 1.1 * seconds(*found), "short prompts would wait for documents at other owners"
        (lone,) = groups(short, documents[:1], short)
        assert lone.waiting == 1201, "one document is computed beside what comes behind it"
        assert [some.waiting for some in groups(documents, short, np.full(6000, 100))] == [60, 600, 6000]

    def test_two_classes_of_prompts(self) -> None:
        assert halves(np.zeros(3), np.zeros(3)) == ()
        assert halves(np.array([100.0, 100.0]), np.array([1e4, 1e4])) == ((1.0, 100.0),)
        short, long = halves(np.array([10.0, 10, 80]), np.array([100.0, 100, 6400]))
        assert short == (0.2, 10.0) and long == (0.8, 80.0)

    def test_arrivals_join(self) -> None:
        (phase, *_) = phases_of(load(running=3, arriving=Arriving(2.0, 900.0, ((1.0, 450.0),), 2000.0)), 0.02)
        assert phase.joining == pytest.approx(2.0 * 500 * 0.02 * (1 - math.exp(-0.2))), "of a life's those of a fifth"
        (coming,) = phase.prompts
        assert coming.tokens == 2000 < 900 * 0.02 * 0.4 * 500, "no more than have come"
        assert coming.lengths == ((1.0, 450.0),)

    def test_those_who_come_take_the_places_of_those_who_end(self) -> None:
        """20 at a time by Little's law, 20 running now; and fewer after those who come have all come."""
        steady, ending = (
            phases_of(load(running=20, arriving=Arriving(2.0, 900.0, ((1.0, 450.0),), tokens)), 0.02)
            for tokens in (1e9, 900.0 * 0.02 * 200)
        )
        for phase in steady:
            assert phase.alive.sum() + phase.joining == pytest.approx(20, rel=0.1)
        assert [bool(phase.prompts) for phase in steady] == [True] * 3
        assert [bool(phase.prompts) for phase in ending] == [True, False, False]
        assert [phase.joining for phase in ending][1:] == sorted((p.joining for p in ending[1:]), reverse=True)
        assert ending[-1].joining < 0.1 * steady[-1].joining

    def test_chances_that_work_ends_are_chances(self) -> None:
        """Also where those who come are soon more than the one that runs."""
        seen = load(left=np.array([50.0]), arriving=Arriving(0.5, 900.0, ((1.0, 450.0),), 1e6))
        ends = [phase.ends for phase in phases_of(seen, 0.02)]
        assert min(ends) >= 0 and sum(ends) == pytest.approx(1)

    def test_while_a_queue_is_served_others_come(self) -> None:
        """Documents beside a crowd that has just come, each computed by one owner of DP."""
        crowd, documents = np.full(200, 300), Arriving(0.2, 4000.0, ((1.0, 20_000.0),), 1e6)

        def seconds(layout: Layout, arriving: Arriving) -> float:
            seen = load(layout, running=0, waiting_prompts=crowd, arriving=arriving)
            (phase,) = phases_of(seen, 0.03)
            assert [prompts.arriving_s for prompts in phase.prompts[1:]] == [4000.0] * (arriving is documents)
            return Estimator(COST, CONFIG, ROOM).time(phase, layout, np.zeros(0, np.int64)).seconds

        more = {layout: seconds(layout, documents) - seconds(layout, NOTHING) for layout in (Layout.TP, Layout.DP)}
        assert more[Layout.DP] > 1.5 * more[Layout.TP] > 0

    def test_what_comes_while_prompts_are_computed_waits_behind_them(self) -> None:
        """More than can be computed: arrivals lengthen the queue, and are shared by owners as it is."""
        queue = np.full(64, 15_000)
        arriving = Arriving(10.0, 150e3, ((1.0, 15e3),), 960e3)
        waiting = load(Layout.DP, running=0, waiting_prompts=queue, waiting_left=30.0)
        (phase,) = phases_of(dataclasses.replace(waiting, arriving=arriving), 0.3)
        (alone,) = phases_of(waiting, 0.3)
        assert phase.prompts[1].tokens == 960e3 == phase.prompts[0].tokens
        times = [Estimator(COST, CONFIG, ROOM).time(some, Layout.DP, np.zeros(0, np.int64)) for some in (phase, alone)]
        assert times[0].steps == pytest.approx(2 * times[1].steps, rel=0.3)

    def test_dealt_out_largest_first(self) -> None:
        seen = load(running=16, held=np.arange(16) * 100)
        homes = homes_under(Layout.DP, seen)
        rows = np.bincount(homes, seen.held, N)
        assert rows.max() == rows.min()
        assert np.array_equal(homes_under(Layout.CP, load(Layout.DP, running=9)), np.arange(9) % N)

    def test_level(self) -> None:
        assert level(np.array([3.0, 0, 0, 1]), 3.0).tolist() == pytest.approx([0, 1 + 1 / 3, 1 + 1 / 3, 1 / 3])
        assert level(np.zeros(4), 2.0).tolist() == [1, 1, 0, 0]
        for more in (0.5, 1.0, 7.25, 40.0):
            assert level(np.array([3.0, 0, 0, 1]), more).sum() == pytest.approx(more)
