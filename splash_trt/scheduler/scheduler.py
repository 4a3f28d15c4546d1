"""Decides what the next step computes. Runs on rank 0 only, never waits, and is deterministic.

A step holds up to max_batch_tokens tokens: first one for each request that decodes, then chunks of the prompts of
requests that hold cache already, then chunks of the prompts of requests that are admitted now. When a rank runs out of
pages, the most junior request with pages there is preempted: it gives its cache up, waits again, and is recomputed
later. Results come back up to plans_in_flight - 1 steps late; until then a running request is assumed to go on.

Seniority is priority, then arrival. A request becomes overdue if it still waits for cache max_wait_s after its arrival,
or if it is preempted later than that. Overdue requests are senior to all others, and among themselves go by arrival
alone.

That bounds how long an overdue request can take. It waits for switches that hold admissions, for the requests that hold
cache at the moment when it becomes overdue, and for overdue requests that arrived earlier. Requests that arrived later
neither get cache before it nor take cache from it. Let S be all of these requests and the overdue one itself; besides
what switches take, it is done after at most

    10 + 2 (plans_in_flight + 1) * sum over S of (ceil(limit / r) + max_tokens + 1)   steps,

where limit is a request's prompt and output together, and r = max_batch_tokens - max_running + 1 is the room that
decodes always leave to prompts. For the most senior request of S is never preempted, and pages that are freed can be
used after at most twice the plans in flight.
"""

from __future__ import annotations

import heapq
from collections import deque

import msgspec
import numpy as np

from splash_trt.cache.directory import Directory
from splash_trt.cache.placement import Placement, num_pages
from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import SPECS, PlacementKind, Tokens
from splash_trt.layout.switch import Goal
from splash_trt.migration.diff import Sizes
from splash_trt.plan import Plan, StepResult
from splash_trt.request import FinishReason, Request, TokenDelta
from splash_trt.scheduler.admission import ExpectedOutput, RankLoads, place, reserve
from splash_trt.scheduler.forecast import Outlook
from splash_trt.scheduler.growth import Growth
from splash_trt.scheduler.ledger import Ledger
from splash_trt.scheduler.load import Load
from splash_trt.scheduler.prefill import in_turn, spread
from splash_trt.scheduler.results import take_in
from splash_trt.scheduler.rows import RowBuilder
from splash_trt.scheduler.sequence import Sequence, WaitingQueue
from splash_trt.scheduler.switcher import Switcher


class InFlight(msgspec.Struct, frozen=True):
    """A plan that was sent and the sequences of its rows."""

    plan: Plan
    sequences: list[Sequence]


class Scheduler:
    """sizes: what ranks hold under each residency. request_tokens: the longest request, prompt and output together,
    that fits into the cache under every allowed layout (memory/map.py). expected_output: how many tokens running
    requests will still generate, for placing new ones; None: estimated from requests that ended (forecast.py)."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        sizes: Sizes,
        request_tokens: int,
        vocab_size: int,
        max_context: int,
        eos_token_ids: tuple[int, ...],
        expected_output: ExpectedOutput | None = None,
    ) -> None:
        self._config = config
        self._request_tokens = request_tokens
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._eos = frozenset(eos_token_ids)
        limits = sizes.pages[SPECS[config.layout].residency]
        self._ledger = Ledger(limits, config.max_running, config.page_tokens)
        self._slots = self._ledger.slots
        self.switcher = Switcher(config, self._ledger, sizes)
        self.outlook = Outlook()
        self._growth = Growth(self._ledger, self.switcher, config.page_tokens, self._preempt)
        self._queue = WaitingQueue(config.max_wait_s)
        self._deadlines: list[tuple[float, int, str]] = []  # (when, arrival, id): a heap
        self._expected_output = self.outlook.lengths.left if expected_output is None else expected_output
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: deque[InFlight] = deque()
        self._arrivals = 0
        self._step = 0  # of the last plan made
        self._completed = 0
        self._now = 0.0
        self.preemptions = 0
        """How often a request was preempted so far."""

    @property
    def layout(self) -> Layout:
        return self.switcher.layout

    @property
    def directory(self) -> Directory:
        return self._ledger.directory

    # Requests in and out

    @property
    def num_running(self) -> int:
        return sum(self._ledger.running_at.tolist())

    @property
    def running_by_rank(self) -> np.ndarray:
        """[N] int64: running requests by owner or home."""
        return self._ledger.running_at

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def has_requests(self) -> bool:
        return bool(self._sequences)

    def add(self, request: Request, *, now: float = 0.0) -> None:
        """Queue a request; ValueError says why this deployment can never serve it."""
        if request.id in self._sequences:
            raise ValueError(f"id: {request.id!r} is the id of a request that is still running")
        request.check(self._vocab_size, self._max_context)
        if len(request.prompt) >= self._request_tokens:
            names = ", ".join(layout.name.lower() for layout in self._config.allowed_layouts)
            raise ValueError(
                f"prompt: {len(request.prompt)} tokens are too many; the cache holds at most {self._request_tokens} "
                f"tokens of one request, prompt and output together, in layouts {names}: raise memory_bytes"
            )
        wish = min(len(request.prompt) + request.sampling.max_tokens, self._max_context)
        limit = min(wish, self._request_tokens)
        p = request.sampling
        stops = (frozenset() if p.ignore_eos else self._eos).union(p.stop_token_ids)
        sequence = Sequence(request, self._arrivals, limit, capped=limit < wish, stops=stops, arrived=now)
        self._arrivals += 1
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (now + request.deadline_s, sequence.arrival, request.id))
        self._sequences[request.id] = sequence
        self.outlook.arrived(now, len(request.prompt))
        self._queue.push(sequence)

    def cancel(self, request_id: str, reason: str | None = None) -> TokenDelta | None:
        """End a request now; None if there is no such request (it may just have finished)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        self._end(sequence, FinishReason.CANCELLED)
        self._reclaim()
        return TokenDelta(request_id, (), finish=FinishReason.CANCELLED, error=reason)

    def expire(self, now: float) -> list[TokenDelta]:
        """Cancel every request whose deadline has passed."""
        deltas = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, arrival, request_id = heapq.heappop(self._deadlines)
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.arrival == arrival:  # not one that ended, or a later one of this id
                deltas.append(self.cancel(request_id, "deadline_s has passed"))
        return [delta for delta in deltas if delta is not None]

    def switch(self, layout: Layout, why: str, *, owners: dict[str, int] | None = None) -> None:
        """Go to `layout` as soon as can be; owners: ranks by request id, for single requests (see Switcher.request)."""
        goal = Goal(layout=layout, why=why, owners=owners or {})
        self.switcher.request(goal, sent=self._step, now=self._now)

    def abort_switch(self, why: str) -> bool:
        """Stay in the present layout; False if no switch was under way or waiting that could still be stopped."""
        return self.switcher.stop(why, sent=self._step, now=self._now)

    def load(self, now: float) -> Load:
        """The present load, for the policy."""
        s, live = self._slots, self._ledger.live()
        total, prompt = s.total[live], s.prompt[live]
        generated = np.maximum(total - prompt, 0)
        waiting = self._queue.tokens()
        return Load(
            now=now,
            layout=self.layout,
            num_ranks=self._config.num_ranks,
            held=s.computed[live],
            prefill=np.maximum(s.admitted[live] - s.computed[live], 0),
            generated=generated,
            left=np.minimum(self.outlook.lengths.left(generated, prompt), s.limit[live] - total),
            home=s.home[live].astype(np.int64),
            slots=live,
            waiting_prompts=waiting,
            waiting_left=self.outlook.lengths.mean(waiting),
            arriving=self.outlook.arrivals.rates(now),
            used_pages=self.directory.live_pages() + reserve(self._ledger.running_at),
            budget_bytes=self.switcher.usual_bytes,
        )

    def owners(self, homes: dict[int, int]) -> dict[str, int]:
        """From {slot: rank} to {request id: rank}, without slots whose request has ended."""
        return {self._slots.sequence(slot).id: rank for slot, rank in homes.items() if self._slots.live[slot]}

    # One step

    def schedule(self, now: float = 0.0) -> Plan | None:
        """The next plan, or None if there is nothing to do before a result comes back. now: seconds, any clock."""
        self._now = now
        self._reclaim()
        self.switcher.advance(step=self._step + 1, sent=self._step, completed=self._done, now=now)
        decodes = self._growth.decodes(sent=self._step, now=now)
        rows = RowBuilder(self._config, self.layout, self._slots, decodes)
        self._prompts(rows)
        changes = self._ledger.take_changes()
        plan = rows.plan(self._step + 1, changes, self.switcher)
        if plan.is_empty:
            self._ledger.keep_changes(changes)
            # Requests that were preempted just now: with no plan in flight no result would come to free their pages.
            self._reclaim()
            return None
        self._step += 1
        self._slots.last_row[plan.slot] = self._step
        self._in_flight.append(InFlight(plan, self._slots.sequences[plan.slot].tolist()))
        return plan

    def complete(self, result: StepResult) -> list[TokenDelta]:
        """Take in the oldest plan's result; returns what it adds to each request."""
        sent = self._in_flight.popleft()
        assert sent.plan.step == result.step, (sent.plan.step, result.step)
        deltas = take_in(sent.plan, sent.sequences, result, self._ended)
        self._completed = result.step
        if self.switcher.completed(sent.plan, result, sent=self._step, now=self._now):
            self._recompute([s for s, armed in zip(sent.sequences, sent.plan.armed, strict=True) if armed])
        self._reclaim()
        return deltas

    def check_idle(self) -> None:
        """Asserts that everything was given back; to be called when no request is left."""
        assert not self._sequences and not self._in_flight and not len(self._queue)
        self._ledger.check_idle()

    # The parts of a step

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._free_cache(sequence)
        self._queue.push(sequence)

    def _recompute(self, sequences: list[Sequence]) -> None:
        """The cache of these requests is incomplete: ignore the results of plans in flight, and compute them again."""
        for sequence in sequences:
            if sequence.finish is None:
                sequence.void_through, sequence.scored = self._step, sequence.reported
                if sequence.slot >= 0:
                    self._preempt(sequence)

    def _prompts(self, rows: RowBuilder) -> None:
        """Add prompt chunks: of requests that hold cache, senior ones first, then of those that are admitted now."""
        s = self._slots
        begun = (s.live & (s.computed < s.admitted)).nonzero()[0]
        admits = len(self._queue) and s.any_free and not self.switcher.holds_admissions
        if not len(begun) and not admits:
            return
        begun = s.senior_first(begun)
        room = self._config.max_batch_tokens - rows.num_tokens
        need = (s.admitted[begun] - s.computed[begun]).tolist()
        slots = begun.tolist()
        owned = SPECS[self.layout].placement is PlacementKind.OWNED
        alone = owned and SPECS[self.layout].tokens is Tokens.SPREAD  # each prompt is computed on one rank
        if admits:
            self._admit(slots, need, room, alone)
        owners = s.home[slots].tolist() if alone else []
        for slot, count in zip(slots, spread(need, owners, room) if alone else in_turn(need, room), strict=True):
            if count:
                rows.prefill(slot, count)

    def _admit(self, slots: list[int], need: list[int], room: int, alone: bool) -> None:
        """Give cache to waiting requests, in their order, as long as the step has room for prompt tokens. The first one
        for which the cache has no room holds up those behind it.

        slots, need: the slots with prompts in this step and the tokens that each has to compute; admitted requests are
        appended. room: prompt tokens of this step. alone: each prompt is computed on its owner alone, so a rank whose
        prompts are less than an even share of the step is given another one even if the step is full.
        """
        num_ranks, total = self._config.num_ranks, sum(need)
        share = room // num_ranks
        at = np.bincount(self._slots.home[slots], need, num_ranks) if alone else np.zeros(num_ranks)
        loads = None
        while self._slots.any_free and (total < room or alone and (at < share).any()):
            sequence = self._queue.peek(self._now)
            if sequence is None or sequence.last_row > self._done:  # it was preempted, and a plan with it is in flight
                return
            loads = loads or RankLoads(self._slots, self._ledger.running_at, self._expected_output)
            num_tokens = len(sequence.tokens)
            found = place(
                self.directory,
                SPECS[self.layout].placement,
                num_pages(num_tokens, self._config.page_tokens),
                num_pages(sequence.limit, self._config.page_tokens),
                loads,
                self.switcher.target_for,
                np.flatnonzero(at < share) if total >= room else None,
            )
            if found is None:
                return
            home = found[0].home
            self._open(sequence, *found)
            loads.add(home, num_tokens, num_tokens - len(sequence.request.prompt), sequence.limit)
            slots.append(sequence.slot)
            need.append(num_tokens)
            total += num_tokens
            at[home] += num_tokens

    def _open(self, sequence: Sequence, placement: Placement, target: Placement | None) -> None:
        self._queue.remove(sequence)
        if sequence.queued_s is None:
            sequence.queued_s = self._now - sequence.arrived
        self._ledger.open(sequence, placement, target, num_pages(len(sequence.tokens), self._config.page_tokens))
        self.switcher.opened(sequence.slot)

    # Ends

    def _ended(self, sequence: Sequence, reason: FinishReason) -> str | None:
        """A request ended by itself. Returns an error to tell its client, or None."""
        if reason is not FinishReason.ERROR:
            prompt = len(sequence.request.prompt)
            self.outlook.lengths.ended(len(sequence.tokens) - prompt, prompt)
        self._end(sequence, reason)
        if reason is FinishReason.LENGTH and sequence.capped:
            return f"the cache holds at most {self._request_tokens} tokens of one request"
        return None

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.end(reason)
        del self._sequences[sequence.id]
        if sequence.slot >= 0:
            self._free_cache(sequence)
        else:
            self._queue.remove(sequence)

    def _free_cache(self, sequence: Sequence) -> None:
        self._ledger.close(sequence, closed_after=self._step)

    @property
    def _done(self) -> int:
        """The last completed plan; with none in flight that is the last plan made."""
        return self._completed if self._in_flight else self._step

    def _reclaim(self) -> None:
        """Free the slots and pages that no plan in flight names any more."""
        self._ledger.reclaim(self._done)
