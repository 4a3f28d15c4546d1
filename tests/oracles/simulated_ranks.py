"""Ranks without a model: they keep a cache as plans say, and choose each token from all that the cache holds of it.

The next token is a hash of (seed, all tokens before it), read back from the pages. So a page given to two requests,
reused too early, copied wrongly or missing on a rank changes tokens, which `expected_tokens` knows without any cache.
Every stored row carries the admission and the position that it was computed for: a row that nobody wrote for this
admission is never taken for one that somebody did, and reading it fails at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import SPECS, Residency
from splash_trt.migration.diff import Sizes
from splash_trt.plan import LAST_SAMPLED, SAMPLE, SAMPLING_DTYPE, Plan, RankStatus, StepResult
from splash_trt.request import FinishReason, Request, TokenDelta
from tests.oracles.simulated_weights import SimulatedWeights

VOCAB = 97


def next_token(seed: int, history: Sequence[int]) -> int:
    return zlib.crc32(np.array([seed, *history], np.int64).tobytes()) % VOCAB


def logprob(history: Sequence[int], token: int) -> float:
    return -(zlib.crc32(np.array([*history, token], np.int64).tobytes()) % 1000) / 100


def expected_tokens(request: Request, *, eos: Iterable[int] = (), limit: int = 1 << 30) -> list[int]:
    """What `request` gets, whatever else runs; limit: most tokens, prompt included."""
    sampling = request.sampling
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos))
    known = list(request.prompt)
    out: list[int] = []
    while len(out) < sampling.max_tokens and len(known) < limit and not (out and out[-1] in stops):
        out.append(next_token(request.seed, known))
        known.append(out[-1])
    return out


@dataclass(frozen=True)
class Row:
    """One token's cache row: whose it is (counted over admissions), where in its request, and which token."""

    life: int
    position: int
    token: int


@dataclass
class Traffic:
    """What one plan moved. Each [N, N] int64, source by target, in rows; `weights` in numbers."""

    rows: np.ndarray
    new_rows: np.ndarray
    weights: np.ndarray

    @classmethod
    def none(cls, num_ranks: int) -> Traffic:
        return cls(*(np.zeros((num_ranks, num_ranks), np.int64) for _ in range(3)))


@dataclass
class RankState:
    """What one rank remembers between plans; (slot, page index) → page."""

    table: dict[tuple[int, int], int] = field(default_factory=dict)
    target: dict[tuple[int, int], int] = field(default_factory=dict)
    pages: dict[int, list[Row | None]] = field(default_factory=dict)


class SimulatedRanks:
    """`execute` is the ranks' side of a step. `held` tells which pages a plan's rows name.

    After each plan: `traffic`, and `touched`: (rank, page, seed) of every page that was read, written or copied.
    """

    def __init__(self, config: EngineConfig, sizes: Sizes | None = None) -> None:
        self._num_ranks, self._page_tokens = config.num_ranks, config.page_tokens
        self._ranks = [RankState() for _ in range(config.num_ranks)]
        self._weights = None if sizes is None else SimulatedWeights(sizes, SPECS[config.layout].residency)
        self._overlay = [1 << 30] * config.num_ranks if sizes is None else list(
            sizes.pages.get(Residency.FULL, (1 << 30,) * config.num_ranks)
        )
        self._last: dict[int, int] = {}
        self._sampling: dict[int, np.void] = {}
        self._life: dict[int, int] = {}  # slot → admission
        self._seeds: list[int] = []  # by admission
        self._epoch = self._attempt = 0
        self.traffic = Traffic.none(self._num_ranks)
        self.touched: set[tuple[int, int, int]] = set()

    def seed(self, slot: int) -> int:
        """Of the request that the slot was last given to."""
        return int(self._sampling[slot]["seed"])

    # Where rows are

    def _holders(self, plan: Plan, row: int, index: int) -> list[int]:
        """Ranks that hold page `index` of a row's request."""
        if plan.layout is Layout.TP:
            return list(range(self._num_ranks))
        home = int(plan.home[row])
        return [(home + index) % self._num_ranks] if plan.layout is Layout.CP else [home]

    def _computing(self, plan: Plan, row: int, index: int) -> list[int]:
        """Ranks that compute the tokens of page `index` of a row."""
        if plan.layout in (Layout.TP, Layout.DOP):
            return list(range(self._num_ranks))
        home = int(plan.home[row])
        striped = plan.layout is Layout.CP and not plan.absorbed[row]
        return [(home + index) % self._num_ranks] if striped else [home]

    def held(self, plan: Plan, row: int) -> set[tuple[int, int]]:
        """(rank, page) that a row reads or writes."""
        last = (int(plan.start[row] + plan.count[row]) - 1) // self._page_tokens
        slot = int(plan.slot[row])
        return {
            (rank, self._ranks[rank].table[slot, index])
            for index in range(last + 1)
            for rank in self._holders(plan, row, index)
        }

    # Pages

    def _put(self, rank: int, page: int, offset: int, row: Row | None) -> None:
        if page >= self._overlay[rank] and self._weights is not None:
            self._weights.overwritten(rank)
        self._ranks[rank].pages.setdefault(page, [None] * self._page_tokens)[offset] = row
        if row is not None:
            self.touched.add((rank, page, self._seeds[row.life]))

    def _get(self, rank: int, page: int, offset: int) -> Row | None:
        rows = self._ranks[rank].pages.get(page)
        row = None if rows is None else rows[offset]
        if row is not None:
            self.touched.add((rank, page, self._seeds[row.life]))
        return row

    def _write(self, plan: Plan, row: int, position: int, token: int) -> None:
        index, offset = divmod(position, self._page_tokens)
        slot = int(plan.slot[row])
        stored = Row(self._life[slot], position, token)
        for rank in self._holders(plan, row, index):
            self._put(rank, self._ranks[rank].table[slot, index], offset, stored)
        if plan.armed[row]:
            for rank in self._computing(plan, row, index):
                state = self._ranks[rank]
                page = state.target.get((slot, index))
                if page is not None and page != state.table.get((slot, index)):
                    self._put(rank, page, offset, stored)

    def _read(self, plan: Plan, row: int, num_tokens: int) -> list[int]:
        """Tokens at positions below num_tokens, the same on every rank that holds them."""
        out: list[int] = []
        slot = int(plan.slot[row])
        for position in range(num_tokens):
            index, offset = divmod(position, self._page_tokens)
            found = {
                self._get(rank, self._ranks[rank].table[slot, index], offset)
                for rank in self._holders(plan, row, index)
            }
            assert len(found) == 1, f"replicas of position {position} of slot {slot} differ: {found}"
            entry = found.pop()
            assert entry is not None, f"position {position} of slot {slot} is read, but nobody wrote it"
            expected = (self._life[slot], position)
            assert (entry.life, entry.position) == expected, f"position {position} of slot {slot} is {entry}"
            out.append(entry.token)
        return out

    # A step

    def apply(self, plan: Plan) -> bool:
        """Tables and sampling parameters of a plan; returns whether it begins an epoch."""
        begins = plan.epoch != self._epoch
        for state in self._ranks:
            if begins:
                state.table, state.target = state.target, state.table
            if begins or plan.attempt != self._attempt:
                state.target = {}
        if self._weights is not None:
            self._weights.take_effect(SPECS[plan.layout].residency, begins, plan.attempt != self._attempt)
        self._epoch, self._attempt = plan.epoch, plan.attempt
        assert plan.sampling.dtype == SAMPLING_DTYPE
        for entry in plan.sampling:
            slot = int(entry["slot"])
            self._sampling[slot] = entry
            self._life[slot] = len(self._seeds)
            self._seeds.append(int(entry["seed"]))
            for state in self._ranks:
                for table in (state.table, state.target):
                    for key in [key for key in table if key[0] == slot]:
                        del table[key]
        for rank, slot, index, page in plan.tables.tolist():
            self._ranks[rank].table[slot, index] = page
        for rank, slot, index, page in plan.target_tables.tolist():
            self._ranks[rank].target[slot, index] = page
        return begins

    def _exchange(self, moves: np.ndarray, failing: Mapping[int, str]) -> None:
        """Rows between ranks: all are read before any is written. A failing rank sends and stores nothing of use."""
        on_the_way = []
        for source, here, target, there, first, count in moves.tolist():
            for offset in range(first, first + count):
                row = self._get(source, here, offset)
                assert row is not None, f"row {offset} of page {here} of rank {source} is sent, but nobody wrote it"
                on_the_way.append((target, there, offset, None if {source, target} & set(failing) else row))
        places = [entry[:3] for entry in on_the_way]
        assert len(set(places)) == len(places), "two copies go to the same row"
        for entry in on_the_way:
            self._put(*entry)

    def _move(self, plan: Plan, failing: Mapping[int, str]) -> None:
        """What is copied before the rows run: inside ranks, then rows and heads between them."""
        local = plan.moves[:, 0] == plan.moves[:, 2]
        users = {(rank, page): self.seed(slot) for rank, slot, _, page in plan.tables.tolist()}
        for rank, here, _, there, first, count in plan.moves[local].tolist():
            rows = self._ranks[rank].pages.get(here, [None] * self._page_tokens)
            before = set(self.touched)
            for offset in range(first, first + count):
                self._put(rank, there, offset, rows[offset])
            seed = users[rank, there]  # not by the rows: some may be left from those who had the page before
            self.touched = before | {(rank, here, seed), (rank, there, seed)}
        self._exchange(plan.moves[~local], failing)
        for source, target, tensor, begin, end in plan.weights.tolist():
            assert self._weights is not None
            if not {source, target} & set(failing):
                self._weights.arrive(source, target, tensor, begin, end)
            for page in [page for page in self._ranks[target].pages if page >= self._overlay[target]]:
                del self._ranks[target].pages[page]

    def _count(self, plan: Plan) -> None:
        self.traffic = traffic = Traffic.none(self._num_ranks)
        for counts, moves in ((traffic.rows, plan.moves), (traffic.new_rows, plan.late_moves)):
            np.add.at(counts, (moves[:, 0], moves[:, 2]), moves[:, 5])
        np.add.at(traffic.weights, (plan.weights[:, 0], plan.weights[:, 1]), plan.weights[:, 4] - plan.weights[:, 3])

    def execute(self, plan: Plan, failing: Mapping[int, str] | None = None) -> StepResult:
        """failing: ranks whose copies to and from others go wrong in this step, with their errors."""
        failing = failing or {}
        self.touched = set()
        begins = self.apply(plan)
        self._count(plan)
        self._move(plan, failing)
        if self._weights is not None and SPECS[plan.layout].residency is Residency.FULL and plan.num_tokens:
            self._weights.check_complete()
        row_of, position = plan.row_of_token.tolist(), plan.position.tolist()
        for row, at, token in zip(row_of, position, plan.token.tolist(), strict=True):
            known = self._last[int(plan.slot[row])] if token == LAST_SAMPLED else token
            self._write(plan, row, at, known)
        ends = (plan.start + plan.count).tolist()
        histories = [self._read(plan, row, end) for row, end in enumerate(ends)]
        result = self._sample(plan, row_of, position, histories)
        self._exchange(plan.late_moves, failing)
        copies = len(plan.late_moves) + len(plan.weights) + int((plan.moves[:, 0] != plan.moves[:, 2]).sum())
        statuses = [RankStatus(failing.get(rank, "") if copies else "", 0.0) for rank in range(self._num_ranks)]
        return StepResult(**result, statuses=tuple(statuses) if plan.attempt or begins else ())

    def _sample(self, plan: Plan, row_of: list[int], position: list[int], histories: list[list[int]]) -> dict:
        """The fields of a StepResult."""
        tokens, logprobs, alternatives = [], [], 0
        for index, target in zip(plan.want_index.tolist(), plan.want_target.tolist(), strict=True):
            slot = int(plan.slot[row_of[index]])
            history = histories[row_of[index]][: position[index] + 1]
            token = next_token(self.seed(slot), history) if target == SAMPLE else target
            if target == SAMPLE:
                self._last[slot] = token
            alternatives = max(alternatives, int(self._sampling[slot]["logprobs"]))
            tokens.append(token)
            logprobs.append(logprob(history, token))
        top = np.tile(np.arange(alternatives), (len(tokens), 1))
        return {
            "step": plan.step,
            "token": np.array(tokens, np.int64),
            "logprob": np.array(logprobs, np.float64),
            "top_token": top.astype(np.int64),
            "top_logprob": -1.0 - top.astype(np.float64),
        }


class Outputs:
    """Deltas of many requests, put together."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}
        self.error: dict[str, str | None] = {}
        self.deltas: dict[str, list[TokenDelta]] = {}

    def take(self, deltas: Iterable[TokenDelta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.finish, f"{delta.request_id}: a delta after its end"
            self.deltas.setdefault(delta.request_id, []).append(delta)
            self.tokens.setdefault(delta.request_id, []).extend(delta.tokens)
            if delta.finish is not None:
                self.finish[delta.request_id] = delta.finish
                self.error[delta.request_id] = delta.error

    def forget(self, request_id: str) -> None:
        """The id may be used again."""
        del self.tokens[request_id], self.finish[request_id], self.error[request_id], self.deltas[request_id]
