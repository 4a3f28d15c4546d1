"""Ranks without a model: they keep a cache as plans say, and choose each token from all that the cache holds of it.

The next token is a hash of (seed, all tokens before it), read back from the pages. So a page given to two requests,
reused too early, copied wrongly or missing on a rank changes tokens, which `expected_tokens` knows without any cache.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from splash_trt.config import EngineConfig, Layout
from splash_trt.plan import LAST_SAMPLED, SAMPLE, SAMPLING_DTYPE, Plan, StepResult
from splash_trt.request import FinishReason, Request, TokenDelta

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


class SimulatedRanks:
    """`execute` is the ranks' side of a step. `held` tells which pages a plan's rows name."""

    def __init__(self, config: EngineConfig) -> None:
        self._num_ranks, self._page_tokens = config.num_ranks, config.page_tokens
        self._pages: dict[tuple[int, int], np.ndarray] = {}  # (rank, page) → its tokens
        self._table: dict[tuple[int, int, int], int] = {}  # (rank, slot, page index) → page
        self._last: dict[int, int] = {}
        self._sampling: dict[int, np.void] = {}

    def seed(self, slot: int) -> int:
        """Of the request that the slot was last given to."""
        return int(self._sampling[slot]["seed"])

    def _holders(self, plan: Plan, row: int, index: int) -> list[int]:
        if plan.layout is Layout.TP:
            return list(range(self._num_ranks))
        home = int(plan.home[row])
        return [(home + index) % self._num_ranks] if plan.layout is Layout.CP else [home]

    def held(self, plan: Plan, row: int) -> set[tuple[int, int]]:
        """(rank, page) that a row reads or writes."""
        last = (int(plan.start[row] + plan.count[row]) - 1) // self._page_tokens
        slot = int(plan.slot[row])
        return {
            (rank, self._table[rank, slot, index])
            for index in range(last + 1)
            for rank in self._holders(plan, row, index)
        }

    def _write(self, plan: Plan, row: int, position: int, token: int) -> None:
        index, offset = divmod(position, self._page_tokens)
        for rank in self._holders(plan, row, index):
            page = self._table[rank, int(plan.slot[row]), index]
            self._pages.setdefault((rank, page), np.full(self._page_tokens, -1))[offset] = token

    def _read(self, plan: Plan, row: int, num_tokens: int) -> list[int]:
        """Tokens at positions below num_tokens, the same on every rank that holds them."""
        out: list[int] = []
        for index in range(-(-num_tokens // self._page_tokens)):
            pages = [
                self._pages[rank, self._table[rank, int(plan.slot[row]), index]].tolist()
                for rank in self._holders(plan, row, index)
            ]
            used = min(self._page_tokens, num_tokens - len(out))
            assert all(page[:used] == pages[0][:used] for page in pages), "replicas differ"
            out += pages[0][:used]
        return out

    def apply(self, plan: Plan) -> None:
        """Everything of a plan that takes effect before its rows run."""
        for rank, slot, index, page in plan.tables.tolist():
            self._table[rank, slot, index] = page
        assert plan.sampling.dtype == SAMPLING_DTYPE
        for entry in plan.sampling:
            self._sampling[int(entry["slot"])] = entry
        for source_rank, source, target_rank, target, first, count in plan.moves.tolist():
            rows = slice(first, first + count)
            page = self._pages.setdefault((target_rank, target), np.full(self._page_tokens, -1))
            page[rows] = self._pages[source_rank, source][rows]

    def execute(self, plan: Plan) -> StepResult:
        self.apply(plan)
        row_of, position = plan.row_of_token.tolist(), plan.position.tolist()
        for row, at, token in zip(row_of, position, plan.token.tolist(), strict=True):
            known = self._last[int(plan.slot[row])] if token == LAST_SAMPLED else token
            self._write(plan, row, at, known)
        tokens, logprobs, alternatives = [], [], 0
        for index, target in zip(plan.want_index.tolist(), plan.want_target.tolist(), strict=True):
            row = row_of[index]
            slot = int(plan.slot[row])
            history = self._read(plan, row, position[index] + 1)
            token = next_token(self.seed(slot), history) if target == SAMPLE else target
            if target == SAMPLE:
                self._last[slot] = token
            alternatives = max(alternatives, int(self._sampling[slot]["logprobs"]))
            tokens.append(token)
            logprobs.append(logprob(history, token))
        top = np.tile(np.arange(alternatives), (len(tokens), 1))
        return StepResult(
            step=plan.step,
            token=np.array(tokens, np.int64),
            logprob=np.array(logprobs, np.float64),
            top_token=top.astype(np.int64),
            top_logprob=-1.0 - top.astype(np.float64),
        )


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
