"""Decides what the next step computes. Runs on rank 0 only; nothing here waits, and nothing depends on time or chance.

A step holds the decodes of all running requests, then prefill chunks of those already admitted, then of new ones, up
to max_batch_tokens. When a rank's pages run out, the most junior request there gives its cache up and is recomputed
later. Results come back up to plans_in_flight - 1 steps late; until then a running request is taken to go on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from splash_trt.cache.directory import Directory
from splash_trt.cache.placement import num_pages
from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import SPECS
from splash_trt.layout.switch import Abort, Goal
from splash_trt.migration.diff import Sizes
from splash_trt.plan import SAMPLE, Plan, StepResult
from splash_trt.request import FinishReason, Request, TokenDelta, TokenLogprob
from splash_trt.scheduler.admission import place
from splash_trt.scheduler.ledger import Ledger
from splash_trt.scheduler.policy import Load
from splash_trt.scheduler.rows import RowBuilder
from splash_trt.scheduler.sequence import Sequence, WaitingQueue
from splash_trt.scheduler.switcher import Switcher


class _Clock(TypedDict):
    """Where rank 0 is: the last plan made, and the time of the last schedule()."""

    sent: int
    now: float


@dataclass(frozen=True)
class InFlight:
    """A plan that was sent and the sequences of its rows."""

    plan: Plan
    sequences: list[Sequence]


class Scheduler:
    """sizes: what ranks hold under each residency. request_tokens: the longest request, prompt and output together,
    that every allowed layout holds (memory/map.py)."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        sizes: Sizes,
        request_tokens: int,
        vocab_size: int,
        max_context: int,
        eos_token_ids: tuple[int, ...],
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
        self._queue = WaitingQueue()
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: deque[InFlight] = deque()
        self._arrivals = 0
        self._step = 0  # of the last plan made
        self._completed = 0
        self._now = 0.0
        self.preemptions = 0
        """How often a request gave its cache up, to be computed again later."""

    @property
    def layout(self) -> Layout:
        return self.switcher.layout

    @property
    def directory(self) -> Directory:
        return self._ledger.directory

    # Requests in and out

    @property
    def num_running(self) -> int:
        return int(self._ledger.running_at.sum())

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
        expires = None if request.deadline_s is None else now + request.deadline_s
        sequence = Sequence(request, self._arrivals, limit, capped=limit < wish, expires=expires, arrived=now)
        self._arrivals += 1
        self._sequences[request.id] = sequence
        self._queue.push(sequence)

    def cancel(self, request_id: str, reason: str | None = None) -> TokenDelta | None:
        """End a request now; None if there is no such request (it may just have finished)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        self._end(sequence, FinishReason.CANCELLED)
        return TokenDelta(request_id, (), finish=FinishReason.CANCELLED, error=reason)

    def expire(self, now: float) -> list[TokenDelta]:
        """Cancel every request whose deadline has passed."""
        late = [s.id for s in self._sequences.values() if s.expires is not None and s.expires <= now]
        deltas = [self.cancel(request_id, "deadline_s has passed") for request_id in late]
        return [delta for delta in deltas if delta is not None]

    def switch(self, layout: Layout, why: str, *, owners: dict[str, int] | None = None) -> None:
        """Go to `layout` as soon as can be; owners: ranks by request id, for single requests (see Switcher.request)."""
        goal = Goal(layout=layout, why=why, owners=owners or {})
        self.switcher.request(goal, sent=self._step, now=self._now)

    def abort_switch(self, why: str) -> bool:
        """Stay where we are; False if there is nothing to abort (any more)."""
        return self.switcher.stop(why, sent=self._step, now=self._now)

    def load(self, now: float, capacity_tokens: dict[Layout, int]) -> Load:
        """What a policy looks at."""
        s, live = self._slots, self._ledger.live()
        prefills = (s.admitted - s.computed)[live].clip(min=0).tolist()
        prefills += [len(sequence.tokens) for sequence in self._queue]
        return Load(
            now=now,
            layout=self.layout,
            num_ranks=self._config.num_ranks,
            running=self.num_running,
            waiting=self.num_waiting,
            held_tokens=int(s.pages[live].sum()) * self._config.page_tokens,
            longest_prefill=max(prefills, default=0),
            chunk_tokens=self._config.max_batch_tokens,
            capacity_tokens=capacity_tokens,
        )

    # One step

    def schedule(self, now: float = 0.0) -> Plan | None:
        """The next plan, or None if there is nothing to do before a result comes back. now: seconds, any clock."""
        self._now = now
        self._reclaim()
        self.switcher.advance(step=self._step + 1, sent=self._step, completed=self._done, now=now)
        rows = RowBuilder(self._config, self.layout, self._slots, self._decodes())
        self._prefills(rows)
        if not self.switcher.holds_admissions:
            self._admissions(rows)
        changes = self._ledger.take_changes()
        plan = rows.plan(self._step + 1, changes, self.switcher)
        if plan.is_empty:
            self._ledger.keep_changes(changes)
            self._reclaim()  # with nothing in flight, no result will come to give back what was preempted just now
            return None
        self._step += 1
        sequences = [self._slots.sequence(slot) for slot in plan.slot.tolist()]
        for sequence in sequences:
            sequence.rows_in_flight += 1
        self._in_flight.append(InFlight(plan, sequences))
        return plan

    def complete(self, result: StepResult) -> list[TokenDelta]:
        """Take in the oldest plan's result; returns what it adds to each request."""
        sent = self._in_flight.popleft()
        assert sent.plan.step == result.step, (sent.plan.step, result.step)
        for sequence in sent.sequences:
            sequence.rows_in_flight -= 1
        row = sent.plan.row_of_token[sent.plan.want_index].tolist()
        deltas = []
        begin = 0
        for end in range(1, len(row) + 1):
            if end == len(row) or row[end] != row[begin]:
                sequence = sent.sequences[row[begin]]
                if sequence.finish is None and result.step > sequence.void_through:
                    deltas.append(self._take(sequence, sent.plan, result, begin, end))
                begin = end
        self._completed = result.step
        if self.switcher.completed(sent.plan, result, sent=self._step, now=self._now):
            self._recompute([s for s, armed in zip(sent.sequences, sent.plan.armed, strict=True) if armed])
        self._reclaim()
        return deltas

    def check_idle(self) -> None:
        """With no request left: everything was given back."""
        assert not self._sequences and not self._in_flight and not len(self._queue)
        self._ledger.check_idle()

    # The parts of a step

    def _decodes(self) -> np.ndarray:
        """Slots that get one token in this step, each with a page for it."""
        s = self._slots
        ready = s.live & (s.computed == s.total - 1) & (s.computed >= s.admitted) & (s.total < s.limit)
        full = np.flatnonzero(ready & (s.computed >= s.pages * self._config.page_tokens))
        if len(full):
            full = s.senior_first(full)
            full = full[self._ledger.grow(full) :]
        promised: np.ndarray | None = None
        while len(full):  # the first of them finds a rank without a free page
            promised = self.directory.leaving_pages() if promised is None else promised
            self._make_room(int(full[0]), promised)
            first, full = full[:1], full[1:]
            ready[first] = s.live[first] & bool(self._ledger.grow(first[s.live[first]]))  # an abort may leave room
            full = full[s.live[full]]
            if len(full):
                full = full[self._ledger.grow(full) :]
        return np.flatnonzero(ready & s.live)

    def _make_room(self, slot: int, promised: np.ndarray) -> None:
        """Preempt until the pages that are about to come free are enough for one more page of `slot`.

        promised [N]: pages leaving and not yet spoken for; changed here. Victims are the most junior first; the last
        one can be the request itself.
        """
        sequence = self._slots.sequence(slot)
        lacking = self._ledger.shortfall(slot)
        while (lacking > promised).any():
            rank = int(np.flatnonzero(lacking > promised)[0])
            before = self.directory.leaving_pages()
            if self.switcher.yields_room(rank):
                why = f"no room: rank {rank} has no page for a running request"
                self.switcher.abort(Abort.NO_ROOM, why, **self._clock)
                lacking = self._ledger.shortfall(slot)
            else:
                victim = self._most_junior_at(rank)
                self._preempt(victim)
                if victim is sequence:
                    return
            promised += self.directory.leaving_pages() - before
        promised -= lacking

    def _most_junior_at(self, rank: int) -> Sequence:
        """Of the requests with a page on `rank`, the one to give its cache up first."""
        slots = self._slots.senior_first(np.flatnonzero(self._slots.live))
        for slot in slots[::-1].tolist():
            sequence = self._slots.sequence(slot)
            if (self.directory[sequence.id].table[:, rank] >= 0).any():
                return sequence
        raise AssertionError(f"rank {rank} is full, yet no request has a page there")

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._free_cache(sequence)
        self._queue.push(sequence)

    def _recompute(self, sequences: list[Sequence]) -> None:
        """These requests' cache is not to be trusted, and neither is what plans on their way make of it."""
        for sequence in sequences:
            if sequence.finish is None:
                sequence.void_through, sequence.scored = self._step, sequence.reported
                if sequence.slot >= 0:
                    self._preempt(sequence)

    def _prefills(self, rows: RowBuilder) -> None:
        """Next chunks of admitted requests, senior ones first."""
        s = self._slots
        for slot in s.senior_first(np.flatnonzero(s.live & (s.computed < s.admitted))).tolist():
            room = self._config.max_batch_tokens - rows.num_tokens
            if room == 0:
                return
            rows.prefill(slot, min(room, int(s.admitted[slot] - s.computed[slot])))

    def _admissions(self, rows: RowBuilder) -> None:
        """Give cache to waiting requests in their order; the first that does not fit holds up the rest."""
        while rows.num_tokens < self._config.max_batch_tokens and self._slots.any_free:
            sequence = self._queue.peek()
            if sequence is None or sequence.rows_in_flight:  # preempted, and a token of it is still on its way
                return
            count = num_pages(len(sequence.tokens), self._config.page_tokens)
            final = num_pages(sequence.limit, self._config.page_tokens)
            kind, switcher = SPECS[self.layout].placement, self.switcher
            found = place(self.directory, kind, count, final, self._ledger.running_at, switcher.target_for)
            if found is None:
                return
            self._queue.remove(sequence)
            if sequence.queued_s is None:
                sequence.queued_s = self._now - sequence.arrived
            self._ledger.open(sequence, *found, count)
            switcher.opened(sequence.slot)
            room = self._config.max_batch_tokens - rows.num_tokens
            rows.prefill(sequence.slot, min(room, len(sequence.tokens)))

    def compact(self, rank: int, limit: int, budget_pages: int) -> int:
        """Let the next plan move up to budget_pages of a rank's pages below `limit`; returns how many."""
        return self._ledger.compact(rank, limit, budget_pages, step=self._step + 1)

    # Ends

    def _take(self, sequence: Sequence, plan: Plan, result: StepResult, begin: int, end: int) -> TokenDelta:
        """What wanted positions [begin, end), all of one row, add to their request."""
        p = sequence.request.sampling
        scores: list[TokenLogprob] = []
        tokens: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprob, ...] = ()
        for i in range(begin, end):
            token = int(result.token[i])
            if plan.want_target[i] != SAMPLE:
                scores.append(_logprob(result, i, p.prompt_logprobs or 0))
                sequence.reported += 1
                continue
            if i in result.errors:
                self._end(sequence, FinishReason.ERROR)
                return TokenDelta(sequence.id, (), (), tuple(scores), FinishReason.ERROR, result.errors[i])
            sequence.tokens.append(token)
            tokens = (token,)
            if p.logprobs is not None:
                logprobs = (_logprob(result, i, p.logprobs),)
        finish = self._finish(sequence) if tokens else None
        error = None
        if finish is not None:
            self._end(sequence, finish)
            if finish is FinishReason.LENGTH and sequence.capped:
                error = f"the cache holds at most {self._request_tokens} tokens of one request"
        first = len(sequence.tokens) == len(sequence.request.prompt) + 1
        queued_s = sequence.queued_s if tokens and first else None
        return TokenDelta(sequence.id, tokens, logprobs, tuple(scores), finish, error, queued_s)

    def _finish(self, sequence: Sequence) -> FinishReason | None:
        p, last = sequence.request.sampling, sequence.tokens[-1]
        if last in p.stop_token_ids or (last in self._eos and not p.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.tokens) >= sequence.limit else None

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish = reason
        del self._sequences[sequence.id]
        if sequence.slot >= 0:
            self._free_cache(sequence)
        else:
            self._queue.remove(sequence)
        self._reclaim()

    def _free_cache(self, sequence: Sequence) -> None:
        self._ledger.close(sequence, closed_after=self._step)

    @property
    def _done(self) -> int:
        """The last plan that has completed, which is the last one made when none is on its way."""
        return self._completed if self._in_flight else self._step

    @property
    def _clock(self) -> _Clock:
        return {"sent": self._step, "now": self._now}

    def _reclaim(self) -> None:
        """Take back what the completed plans were the last to name."""
        self._ledger.reclaim(self._done)


def _logprob(result: StepResult, i: int, alternatives: int) -> TokenLogprob:
    ids = result.top_token[i, :alternatives].tolist()
    top = zip(ids, result.top_logprob[i, :alternatives].tolist(), strict=True)
    return TokenLogprob(int(result.token[i]), float(result.logprob[i]), tuple(top))
