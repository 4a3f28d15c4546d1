"""Runs the server's own scheduler, policy and orchestrator against simulated ranks, from the first arrival to the last
token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from splash_trt.config import EngineConfig, Layout
from splash_trt.memory.map import capacity, model_sizes, request_tokens
from splash_trt.models.config import ModelConfig
from splash_trt.orchestrator import Orchestrator, scheduler_of
from splash_trt.request import Request, SamplingParams
from splash_trt.scheduler.policy import Policy
from splash_trt.scheduler.scheduler import Scheduler
from splash_trt.simulate.clock import SimulatedClock
from splash_trt.simulate.engine import (
    END_OF_TEXT,
    FILLER,
    Price,
    SimulatedEngine,
    StepCost,
    cheapest_price,
    plain_price,
)
from splash_trt.simulate.outcome import CEILING, Outcome
from splash_trt.simulate.source import Source
from splash_trt.simulate.tally import Series

IDLE_TURN_S = 1e-3  # the time that a turn of rank 0's loop takes if nothing is sent and nothing is in flight
MOST_IDLE_TURNS = 1_000_000  # in a row: longer than any deadline of a switch, so nothing would ever happen
PROGRESS_STEPS = 256

Progress = Callable[[float, int], None]
"""(simulated seconds, requests that have ended)."""


def longest_request(model: ModelConfig, config: EngineConfig) -> int:
    """The most tokens, prompt and output together, that a request may have under `config`."""
    return min(config.context_of(model.max_positions), request_tokens(model, config))


def simulate(
    model: ModelConfig,
    config: EngineConfig,
    cost: StepCost,
    source: Source,
    *,
    label: str,
    policy: Policy | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Serve all requests of `source`, in the layouts that `policy` chooses; without a policy, in config.layout."""
    engine_price = plain_price(cost, config.num_ranks)
    return _Run(model, config, source, policy=policy).serve(lambda _: engine_price, label, progress)


def ceiling(
    model: ModelConfig,
    config: EngineConfig,
    cost: StepCost,
    source: Source,
    *,
    progress: Progress | None = None,
) -> Outcome:
    """An upper bound that no server can reach: the same scheduler, but each step takes as long as in the layout that is
    fastest for it, as if every layout's weights, and every request's cache in its placement, were always there.

    Room: requests are admitted as in the roomiest of the allowed layouts. A step may take the time of any layout that
    holds, in total over its ranks, the distinct tokens that are held then, whether or not they would fit on each rank.
    Owners and homes are those that admission chose. Prompts are computed one after the other, as in every layout but
    DP; a step in DP is taken to have them spread over its ranks (see engine.cheapest_price).

    This bounds what following the load can bring with this scheduler, not what another scheduler could do. And it is
    greedy: if admitting fewer requests ends the last one sooner, a run can be ahead of it by a hair.
    """
    room = {layout: capacity(model, config, layout).total_tokens for layout in config.allowed_layouts}
    roomiest = max(room, key=lambda layout: (room[layout], layout is not Layout.TP))
    # If DP is the roomiest, admit as in CP, which has as much room: in DP, plans would have prompts of several owners.
    accounting = Layout.CP if roomiest is Layout.DP else roomiest
    alone = dataclasses.replace(config, layout=accounting, layouts=())

    def price(scheduler: Scheduler) -> Price:
        def held() -> int:
            return int(scheduler.directory.live_pages().sum()) * config.page_tokens

        return cheapest_price(cost, alone, room, held, lambda: scheduler.num_waiting)

    return _Run(model, alone, source, policy=None).serve(price, CEILING, progress)


class _Run:
    """One run: a server and a load."""

    def __init__(self, model: ModelConfig, config: EngineConfig, source: Source, *, policy: Policy | None) -> None:
        self._config = config
        self._source = source
        self._policy = policy
        self._sizes = model_sizes(model, config)
        self._scheduler = scheduler_of(model, config)
        # What a client asks for that does not know how long answers get: enough for the longest, the same for all.
        self._max_tokens = 1 << (source.max_output - 1).bit_length()
        self._prompts: dict[int, tuple[int, ...]] = {}

    def serve(self, price_of: Callable[[Scheduler], Price], label: str, progress: Progress | None) -> Outcome:
        """Serve all requests to the end."""
        clock, source, scheduler = SimulatedClock(), self._source, self._scheduler
        engine = SimulatedEngine(self._config, self._sizes, price_of(scheduler), clock, source)
        orchestrator = Orchestrator(
            scheduler,
            engine.execute,
            self._config.plans_in_flight,
            policy=self._policy,
            clock=clock,
        )
        series, turns, idle_turns = Series(), 0, 0
        arrived = engine.tally.arrived_s
        while True:
            for time_s, number in source.due(clock.now):
                orchestrator.add(self._request(number))
                arrived[number] = time_s
            if orchestrator.idle:
                upcoming = source.next_s()
                if upcoming is None:
                    break
                clock.advance(upcoming)
                continue
            sent = engine.steps
            turn = orchestrator.turn()
            if not turn.step:
                idle_turns = idle_turns + 1 if engine.steps == sent else 0
                assert idle_turns < MOST_IDLE_TURNS, "requests are left, and the scheduler plans nothing"
                if idle_turns:
                    clock.advance(clock.now + IDLE_TURN_S)
                continue
            source.watch(engine.layout, clock.now)
            turns += 1
            if turns % series.every == 0:
                self._look(series, clock.now, engine)
            if progress is not None and turns % PROGRESS_STEPS == 0:
                engine.tally.flush()
                progress(clock.now, int((~np.isnan(engine.tally.last_s)).sum()))
        engine.tally.flush()
        scheduler.check_idle()
        return self._outcome(label, engine, series)

    def _request(self, number: int) -> Request:
        """A request as a client sends it: with max_tokens, but without the length that its answer will have."""
        length = int(self._source.prompt_tokens[number])
        prompt = self._prompts.get(length)
        if prompt is None:
            prompt = self._prompts[length] = (FILLER,) * length
        sampling = SamplingParams(
            max_tokens=self._max_tokens,
            temperature=0.0,
            seed=number,
            stop_token_ids=(END_OF_TEXT,),
            ignore_eos=True,
        )
        return Request(id=str(number), prompt=prompt, sampling=sampling)

    def _look(self, series: Series, now: float, engine: SimulatedEngine) -> None:
        scheduler = self._scheduler
        share = scheduler.directory.share_held()
        running, waiting = scheduler.num_running, scheduler.num_waiting
        series.add(now, int(engine.layout), engine.output_tokens, engine.prompt_tokens, running, waiting, share)

    def _outcome(self, label: str, engine: SimulatedEngine, series: Series) -> Outcome:
        tally = engine.tally
        done = ~np.isnan(tally.arrived_s)
        prompt, output = self._source.prompt_tokens[done], self._source.output_tokens[done]
        arrived, first, last = tally.arrived_s[done], tally.first_s[done], tally.last_s[done]
        assert not np.isnan(last).any(), f"{int(np.isnan(last).sum())} requests never ended"
        busy = sum(engine.seconds_in.values())
        records = tuple(self._scheduler.switcher.records)
        with np.errstate(invalid="ignore", divide="ignore"):
            tpot = np.where(output > 1, (last - first) / (output - 1), np.nan)
        return Outcome(
            label=label,
            makespan_s=float(last.max()),
            prompt_tokens=int(prompt.sum()),
            output_tokens=int(output.sum()),
            ttft_s=first - arrived,
            tpot_s=tpot,
            latency_s=last - arrived,
            gap_p50_s=tally.gap_s(50),
            gap_p99_s=tally.gap_s(99),
            gap_max_s=tally.longest_gap_s,
            steps=engine.steps,
            recomputed=self._scheduler.preemptions,
            layout_share={n.name.lower(): s / busy for n, s in engine.seconds_in.items() if s},
            num_switches=records[-1].number if records else 0,
            switches=records,
            layout_changes=tuple(engine.changes),
            series=series,
        )
