"""What a batch amounts to on each rank under each layout: the quantities in which work.py counts operations.

Everything that a step costs is linear in these, so that a layout's operations are a table of numbers made once, and a
batch a small matrix [len(QUANTITIES), N]. One column stands for all ranks where they all do the same (TP).

Where only sums over requests are known, requests count as alike: a context is the mean context. What the layouts do
with tokens and rows is that of runtime/{inputs,rounds,absorbed,expanded}.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from splash_trt.config import EngineConfig, Layout
from splash_trt.models.config import ModelConfig
from splash_trt.scheduler.batch import Batch

QUANTITIES = (
    "one",
    "all",  # tokens of the step
    "here",  # of these, those whose hidden state the rank holds
    "busy",  # 1 if there are any
    "touched",  # routed experts here that some token chose
    "sampled",  # positions to sample
    "decoding",  # 1 if the step has any decode token
    "absorbed",  # decode tokens whose heads' queries the rank absorbs, and whose outputs it projects
    "absorbing",  # 1 if there are any
    "read",  # decode tokens that the rank attends for
    "rows",  # cache rows that it reads for them
    "crossing",  # decode tokens that go to other ranks to be attended for, or come from there, whichever is more
    "prefill",  # prefill tokens here, attending expanded
    "pairs",  # (query, key) pairs of theirs
    "context",  # cache rows that are up-projected here
    "rounds",  # in so many blocks
    "fetches",  # blocks of context that cross ranks for prefill
    "fetched",  # cache rows sent to other ranks for prefill, or received, whichever is more
    "sparse",  # prefill tokens here that attend to chosen rows, absorbed
    "sparse_rows",  # which are so many
    "choosing",  # 1 if there are any such tokens in the step
    "index_pairs",  # (query, key) pairs that the indexer scores here
    "index_rows",  # indexer keys read for that
)
INDEX = {name: i for i, name in enumerate(QUANTITIES)}
(
    _ONE, _ALL, _HERE, _BUSY, _TOUCHED, _SAMPLED, _DECODING, _ABSORBED, _ABSORBING, _READ, _ROWS, _CROSSING, _PREFILL,
    _PAIRS, _CONTEXT, _ROUNDS, _FETCHES, _FETCHED, _SPARSE, _SPARSE_ROWS, _CHOOSING, _INDEX_PAIRS, _INDEX_ROWS,
) = range(len(QUANTITIES))  # fmt: skip


@dataclass(frozen=True)
class _Sums:
    """Of a batch over all ranks."""

    decode: float
    rows: float
    attended: float
    """Rows that decode tokens attend to: all of their context, or what the indexer leaves."""
    prefill: float
    pairs: float
    context: float
    dense: bool
    """Prefill attends expanded to everything before it; else absorbed, to chosen rows only."""
    chosen: float
    """Pairs of prefill tokens with rows that the indexer leaves."""


class Quantities:
    """Of batches under one layout. padded: attention computes each context to the longest's length, and the whole
    rectangle of a prompt's triangle, as the plain reference does."""

    def __init__(self, model: ModelConfig, config: EngineConfig, layout: Layout, *, padded: bool = False) -> None:
        self._model = model
        self._ranks = config.num_ranks
        self._page = config.page_tokens
        self._block = config.context_block
        self._padded = padded
        self._top_k = math.inf if model.indexer is None else float(model.indexer.top_k)
        experts = model.experts
        self._experts = -(-experts.num_experts // self._ranks) if experts else 0
        self._unchosen = 1 - experts.top_k / experts.num_experts if experts else 1.0
        layout = layout if self._ranks > 1 else Layout.TP
        self._fill: Callable[[np.ndarray, Batch, _Sums], None] = {
            Layout.TP: self._tp, Layout.DP: self._dp, Layout.CP: self._cp, Layout.DOP: self._dop
        }[layout]  # fmt: skip
        self._columns = 1 if layout is Layout.TP else self._ranks

    def of(self, batch: Batch) -> np.ndarray:
        """[len(QUANTITIES), N or 1] float64."""
        sums = self._sums(batch)
        x = np.zeros((len(QUANTITIES), self._columns))
        tokens = sums.decode + sums.prefill
        x[_ONE] = 1
        x[_ALL] = tokens
        x[_TOUCHED] = self._experts * (1 - self._unchosen**tokens)
        x[_SAMPLED] = batch.sampled
        x[_DECODING] = sums.decode > 0
        self._fill(x, batch, sums)
        x[_BUSY] = x[_HERE] > 0
        x[_ABSORBING] = x[_ABSORBED] > 0
        return x

    def _sums(self, batch: Batch) -> _Sums:
        decode = sum(batch.decode_tokens.tolist())
        rows = sum(batch.decode_context.tolist())
        attended = min(rows, self._top_k * decode) if decode else 0.0
        if self._padded and decode:
            longest = batch.decode_longest or rows / decode
            attended = decode * min(math.ceil(longest / self._page) * self._page, self._top_k)
        prefill = sum(batch.prefill_tokens.tolist())
        if not prefill:
            return _Sums(decode, rows, attended, 0.0, 0.0, 0.0, True, 0.0)
        pairs, context = sum(batch.prefill_pairs.tolist()), sum(batch.prefill_context.tolist())
        if self._padded and context > prefill / 2:
            # k chunks alike of n tokens with c rows: pairs = k n (c - n / 2 + 1 / 2), and the rectangles are k n c.
            pairs = (pairs - prefill / 2) * context / (context - prefill / 2)
        chosen = min(pairs, self._top_k * prefill)
        return _Sums(
            decode, rows, attended, prefill, pairs, context, self._dense(prefill, pairs, context, chosen), chosen
        )

    def _dense(self, tokens: float, pairs: float, context: float, chosen: float) -> bool:
        """Whether expanded attention to everything takes fewer multiplications than absorbed attention to what the
        indexer chose: that choice is left to whoever runs it."""
        m = self._model
        if m.indexer is None:
            return True
        up = m.kv_lora_rank * (m.qk_nope_head_dim + m.v_head_dim)
        expanded = pairs * (m.qk_head_dim + m.v_head_dim) + context * up
        return expanded <= chosen * (m.row_width + m.kv_lora_rank) + tokens * up

    def _prefill(self, x: np.ndarray, sums: _Sums, share: float | np.ndarray, context: float | np.ndarray) -> None:
        """share: of the step's prefill tokens that is here; context: rows that they reach."""
        if sums.dense:
            x[_PREFILL] = sums.prefill * share
            x[_PAIRS] = sums.pairs * share
            x[_CONTEXT] = context
            x[_ROUNDS] = np.ceil(np.divide(context, self._block))
        else:
            x[_SPARSE] = sums.prefill * share
            x[_SPARSE_ROWS] = sums.chosen * share
            x[_CHOOSING] = 1
        x[_INDEX_ROWS] += context

    def _tp(self, x: np.ndarray, batch: Batch, sums: _Sums) -> None:
        x[_HERE] = sums.decode + sums.prefill
        x[_ABSORBED] = x[_READ] = sums.decode
        x[_ROWS] = sums.attended
        x[_INDEX_PAIRS] = sums.rows + sums.pairs
        x[_INDEX_ROWS] = sums.rows
        if sums.prefill:
            self._prefill(x, sums, 1.0, sums.context)

    def _dp(self, x: np.ndarray, batch: Batch, sums: _Sums) -> None:
        decode = batch.decode_tokens
        x[_ABSORBED] = x[_READ] = x[_HERE] = decode
        if sums.rows:
            x[_ROWS] = self._own_rows(batch, sums)
        x[_INDEX_PAIRS] = x[_INDEX_ROWS] = batch.decode_context
        if sums.prefill:
            x[_HERE] += batch.prefill_tokens
            x[_INDEX_PAIRS] += batch.prefill_pairs
            self._prefill(x, sums, batch.prefill_tokens / sums.prefill, batch.prefill_context)
            self._own_pairs(x, batch, sums)

    def _own_pairs(self, x: np.ndarray, batch: Batch, sums: _Sums) -> None:
        """Where a rank has its own requests only, the pairs are distributed as theirs, not as tokens; and however long
        theirs are, a token attends to no more rows than the indexer leaves."""
        pairs = batch.prefill_pairs * (sums.pairs / batch.prefill_pairs.sum())
        if sums.dense:
            x[_PAIRS] = pairs
        else:
            x[_SPARSE_ROWS] = np.minimum(pairs, self._top_k * batch.prefill_tokens)

    def _own_rows(self, batch: Batch, sums: _Sums) -> np.ndarray:
        """[N] rows that decode tokens attend to where each rank has those of its own requests."""
        if self._padded or math.isinf(self._top_k):
            return batch.decode_context * (sums.attended / sums.rows)
        return np.minimum(batch.decode_context, self._top_k * batch.decode_tokens)

    def _cp(self, x: np.ndarray, batch: Batch, sums: _Sums) -> None:
        ranks = self._ranks
        decode = batch.decode_tokens
        x[_ABSORBED] = x[_HERE] = decode
        if sums.decode:
            mean = sums.rows / sums.decode
            readers = min(ranks, math.ceil(mean / self._page))
            x[_READ] = read = np.maximum(sums.decode * readers / ranks, decode)
            # A context shorter than its share of a page lies at home.
            x[_ROWS] = np.maximum(sums.attended / ranks, decode * min(self._page, sums.attended / sums.decode, mean))
            x[_CROSSING] = np.maximum(decode * (readers - 1), read - decode)
            x[_INDEX_PAIRS] = x[_INDEX_ROWS] = np.maximum(sums.rows / ranks, decode * min(self._page, mean))
        if sums.prefill:
            largest = min(sums.prefill, math.ceil(sums.prefill / (ranks * self._page)) * self._page)
            share = np.full(ranks, (1 - largest / sums.prefill) / (ranks - 1))
            share[0] = largest / sums.prefill
            x[_HERE] += sums.prefill * share
            x[_FETCHED] = sums.context * (ranks - 1) / ranks
            x[_FETCHES] = math.ceil(sums.context / self._block)
            x[_INDEX_PAIRS] += sums.pairs * share
            self._prefill(x, sums, share, sums.context * (share > 0))  # who has no query needs no keys

    def _dop(self, x: np.ndarray, batch: Batch, sums: _Sums) -> None:
        ranks = self._ranks
        decode = batch.decode_tokens
        x[_HERE] = sums.decode + sums.prefill
        x[_ABSORBED] = sums.decode
        x[_READ] = decode
        if sums.rows:
            x[_ROWS] = self._own_rows(batch, sums)
        x[_CROSSING] = np.maximum(decode * (ranks - 1), sums.decode - decode) / ranks
        x[_INDEX_PAIRS] = x[_INDEX_ROWS] = batch.decode_context
        if sums.prefill:
            before = batch.prefill_context - batch.prefill_tokens
            crossing = sums.context - sums.prefill
            x[_FETCHED] = np.maximum(before * (ranks - 1), crossing - before)
            x[_FETCHES] = math.ceil(sums.context / self._block) if crossing else 0
            x[_INDEX_PAIRS] += batch.prefill_pairs
            self._prefill(x, sums, 1.0, sums.context)
            x[_INDEX_ROWS] += batch.prefill_context - sums.context  # keys are read where they lie
