"""Decides what the next step computes. Runs on rank 0 only; nothing here waits, and nothing depends on time or chance.

A step holds the decodes of all running requests, then prefill chunks of those already admitted, then of new ones, up
to max_batch_tokens. When a rank's pages run out, the most junior request there gives its cache up and is recomputed
later. Results come back up to plans_in_flight - 1 steps late; until then a running request is taken to go on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from splash_trt.cache.compaction import compact
from splash_trt.cache.directory import Directory
from splash_trt.cache.placement import num_pages
from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import SPECS
from splash_trt.plan import SAMPLE, Plan, StepResult
from splash_trt.request import FinishReason, Request, TokenDelta, TokenLogprob
from splash_trt.scheduler.admission import place
from splash_trt.scheduler.rows import RowBuilder
from splash_trt.scheduler.sequence import Sequence, WaitingQueue
from splash_trt.scheduler.slots import Slots


@dataclass(frozen=True)
class InFlight:
    """A plan that was sent and the sequences of its rows."""

    plan: Plan
    sequences: list[Sequence]


class Scheduler:
    """pages_per_rank and request_tokens are the layout's capacity (memory/map.py)."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        pages_per_rank: tuple[int, ...],
        request_tokens: int,
        vocab_size: int,
        max_context: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.layout: Layout = config.layout
        self.epoch = 0
        self.directory = Directory(pages_per_rank)
        self._config = config
        self._request_tokens = request_tokens
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._eos = frozenset(eos_token_ids)
        self._slots = Slots(config.max_running)
        self._queue = WaitingQueue()
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: deque[InFlight] = deque()
        self._closed_slots: deque[tuple[int, int]] = deque()  # (last plan that may name it, slot)
        self._arrivals = 0
        self._step = 0  # of the last plan made
        self._completed = 0
        self._running_at = np.zeros(config.num_ranks, np.int64)
        self._tables: list[np.ndarray] = []  # block-table changes for the next plan, [C, 4] each
        self._moves: list[tuple[int, int, int, int]] = []
        self._new: list[Sequence] = []

    # Requests in and out

    @property
    def num_running(self) -> int:
        return int(self._running_at.sum())

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
            raise ValueError(
                f"prompt: {len(request.prompt)} tokens are too many; layout {self.layout.name.lower()} holds at most "
                f"{self._request_tokens} tokens of one request, prompt and output together: raise memory_bytes"
            )
        wish = min(len(request.prompt) + request.sampling.max_tokens, self._max_context)
        limit = min(wish, self._request_tokens)
        expires = None if request.deadline_s is None else now + request.deadline_s
        sequence = Sequence(request, self._arrivals, limit, capped=limit < wish, expires=expires)
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

    # One step

    def schedule(self) -> Plan | None:
        """The next plan, or None if there is nothing to compute before a result comes back."""
        decodes = self._decodes()
        rows = RowBuilder(self._config, self.layout, self._slots, decodes)
        self._prefills(rows)
        self._admissions(rows)
        if rows.num_tokens == 0 and not self._moves:
            self._reclaim()  # with nothing in flight, no result will come to give back what was preempted just now
            return None
        self._step += 1
        plan = rows.plan(
            step=self._step,
            epoch=self.epoch,
            tables=np.concatenate(self._tables) if self._tables else np.zeros((0, 4), np.int32),
            admitted=self._new,
            moves=np.array(self._moves, np.int32).reshape(-1, 4),
        )
        self._tables, self._moves, self._new = [], [], []
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
                if sequence.finish is None:  # else it ended while this row was on its way
                    deltas.append(self._take(sequence, sent.plan, result, begin, end))
                begin = end
        self._completed = result.step
        self._reclaim()
        return deltas

    def check_idle(self) -> None:
        """With no request left: everything was given back."""
        assert not self._sequences and not self._in_flight and not len(self._queue)
        self.directory.check()
        assert self.directory.free_pages().tolist() == [pool.limit for pool in self.directory.pools]
        assert not self._slots.live.any() and not self._closed_slots and not self._running_at.any()

    # The parts of a step

    def _decodes(self) -> np.ndarray:
        """Slots that get one token in this step, each with a page for it."""
        s = self._slots
        ready = s.live & (s.computed == s.total - 1) & (s.computed >= s.admitted) & (s.total < s.limit)
        full = ready & (s.computed >= s.pages * self._config.page_tokens)
        promised = self.directory.leaving_pages()
        for slot in s.senior_first(np.flatnonzero(full)).tolist():
            if s.live[slot] and not self._grow(slot):
                ready[slot] = False
                self._make_room(slot, promised)
        return np.flatnonzero(ready & s.live)

    def _grow(self, slot: int) -> bool:
        """One more page for a slot, if every rank that has to hold it has one free."""
        sequence = self._slots.sequence(slot)
        entry = self.directory[sequence.id]
        if self.directory.missing(entry.placement, entry.num_pages, 1).any():
            return False
        self._add_pages(sequence, 1)
        self._slots.pages[slot] += 1
        return True

    def _add_pages(self, sequence: Sequence, count: int) -> None:
        added = self.directory.grow(sequence.id, count)
        slot = np.full((len(added), 1), sequence.slot, np.int32)
        self._tables.append(np.concatenate([added[:, :1], slot, added[:, 1:]], axis=1))

    def _make_room(self, slot: int, promised: np.ndarray) -> None:
        """Preempt until the pages that are about to come free are enough for one more page of `slot`.

        promised [N]: pages leaving and not yet spoken for; changed here. Victims are the most junior first; the last
        one can be the request itself.
        """
        sequence = self._slots.sequence(slot)
        entry = self.directory[sequence.id]
        lacking = self.directory.missing(entry.placement, entry.num_pages, 1)
        while (lacking > promised).any():
            rank = int(np.flatnonzero(lacking > promised)[0])
            victim = self._most_junior_at(rank)
            before = self.directory.leaving_pages()
            self._preempt(victim)
            promised += self.directory.leaving_pages() - before
            if victim is sequence:
                return
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
        self._free_cache(sequence)
        self._queue.push(sequence)

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
            placement = place(self.directory, SPECS[self.layout].placement, count, final, self._running_at)
            if placement is None:
                return
            self._queue.remove(sequence)
            self._slots.open(sequence, placement.home, count)
            self._running_at[placement.home] += 1
            self.directory.open(sequence.id, placement)
            self._add_pages(sequence, count)
            self._new.append(sequence)
            room = self._config.max_batch_tokens - rows.num_tokens
            rows.prefill(sequence.slot, min(room, len(sequence.tokens)))

    def compact(self, rank: int, limit: int, budget_pages: int) -> int:
        """Let the next plan move up to budget_pages of a rank's pages below `limit`; returns how many."""
        moved = compact(self.directory, rank, limit, budget_pages, step=self._step + 1)
        for request_id, index, old, new in moved:
            slot = self._sequences[request_id].slot
            self._tables.append(np.array([[rank, slot, index, new]], np.int32))
            self._moves.append((rank, old, rank, new))
        return len(moved)

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
                continue
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
        return TokenDelta(sequence.id, tokens, logprobs, tuple(scores), finish, error)

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
        """Pages and slot go back once no plan in flight names them. Changes not yet sent may still name them: such
        entries are overwritten before the slot is read again."""
        slot = sequence.slot
        if sequence in self._new:
            self._new.remove(sequence)
        self._running_at[self._slots.home[slot]] -= 1
        self._slots.close(slot)
        self._closed_slots.append((self._step, slot))
        self.directory.close(sequence.id, step=self._step)

    def _reclaim(self) -> None:
        """Take back what the completed plans were the last to name."""
        done = self._step if not self._in_flight else self._completed
        self.directory.completed(done)
        while self._closed_slots and self._closed_slots[0][0] <= done:
            self._slots.release(self._closed_slots.popleft()[1])


def _logprob(result: StepResult, i: int, alternatives: int) -> TokenLogprob:
    ids = result.top_token[i, :alternatives].tolist()
    top = zip(ids, result.top_logprob[i, :alternatives].tolist(), strict=True)
    return TokenLogprob(int(result.token[i]), float(result.logprob[i]), tuple(top))
