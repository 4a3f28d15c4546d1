"""Turns a batch into the quantities in which work.py counts operations, for each rank under each layout.

Everything that a step costs is linear in these quantities. So a layout's operations are a table of numbers that is made
once, and a batch is a small matrix [len(QUANTITIES), N]; one column where all ranks do the same (TP).

Where only sums over requests are known, all requests are taken to be alike, with the mean context. Which rank does what
with tokens and rows follows runtime/{step_arrays,context_rounds,latent_attention}.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from splash_trt.config import EngineConfig, Layout
from splash_trt.models.config import ModelConfig
from splash_trt.scheduler.batch import Batch

QUANTITIES = (
    "one",
    "all",  # tokens of the step
    "here",  # of these, those whose hidden state the rank holds
    "busy",  # 1 if there are any
    "touched",  # routed experts that some token chose, of those that are here or have a part here
    "sampled",  # positions to sample
    "decoding",  # 1 if the step has any decode token
    "absorbed",  # decode tokens whose heads' queries the rank absorbs, and whose outputs it projects
    "absorbing",  # 1 if there are any
    "read",  # decode tokens that the rank attends for
    "rows",  # cache rows that it reads for them
    "crossing",  # decode tokens that go to other ranks to be attended for, or come from there, whichever is more
    "prefill",  # prefill tokens here, attending expanded
    "pairs",  # (query, key) pairs of theirs
    "context",  # cache rows that they reach
    "expanded",  # rows that are up-projected for it here, padding included
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
    _PAIRS, _CONTEXT, _EXPANDED, _ROUNDS, _FETCHES, _FETCHED, _SPARSE, _SPARSE_ROWS, _CHOOSING, _INDEX_PAIRS,
    _INDEX_ROWS,
) = range(len(QUANTITIES))  # fmt: skip


LEAST_ROWS, MOST_APART = 256.0, 512.0
"""Sizes of captured steps: see runtime/shapes.py."""

Column = list[float]
"""By quantity: what is the same on all ranks."""


class Sums(msgspec.Struct, frozen=True, gc=False):
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

    @property
    def tokens(self) -> float:
        return self.decode + self.prefill


class Quantities:
    """Of batches under one layout. padded: attention computes each context to the longest's length, and the whole
    rectangle of a prompt's triangle, as the plain reference does."""

    def __init__(self, model: ModelConfig, config: EngineConfig, layout: Layout, *, padded: bool = False) -> None:
        self._model = model
        self._ranks = config.num_ranks
        self._page = config.page_tokens
        self._block = config.context_block
        self._padded = padded
        self._graphed = config.run_on == "gpu"
        self._layout = layout
        self._top_k = math.inf if model.indexer is None else float(model.indexer.top_k)
        experts = model.experts
        holders = 1 if config.experts_cut == "inside" else self._ranks
        self._experts = -(-experts.num_experts // holders) if experts else 0
        self._unchosen = 1 - experts.top_k / experts.num_experts if experts else 1.0
        layout = layout if self._ranks > 1 else Layout.TP
        self._over_ranks: Callable[[Column, Batch, Sums], np.ndarray] = {
            Layout.TP: self._tp, Layout.DP: self._dp, Layout.CP: self._cp, Layout.DOP: self._dop
        }[layout]  # fmt: skip

    def of(self, batch: Batch, sums: Sums) -> np.ndarray:
        """[len(QUANTITIES), N or 1] float64. sums: of the batch."""
        column: Column = [0.0] * len(QUANTITIES)
        tokens = sums.decode + sums.prefill
        column[_ONE] = 1.0
        column[_ALL] = tokens
        column[_TOUCHED] = self._experts * (1 - self._unchosen**tokens)
        column[_SAMPLED] = float(batch.sampled)
        column[_DECODING] = float(sums.decode > 0)
        return self._over_ranks(column, batch, sums)

    def _everywhere(self, column: Column) -> np.ndarray:
        """[len(QUANTITIES), N] float64. Rows where ranks differ are then put over it."""
        x = np.empty((len(column), self._ranks))
        x[:] = np.array(column)[:, None]
        return x

    def sums(self, batch: Batch) -> Sums:
        decode, rows = sum(batch.decode_tokens.tolist()), sum(batch.decode_context.tolist())
        prefill = sum(batch.prefill_tokens.tolist())
        attended = min(rows, self._top_k * decode) if decode else 0.0
        if self._padded and decode:
            longest = batch.decode_longest or rows / decode
            attended = decode * min(math.ceil(longest / self._page) * self._page, self._top_k)
        if not prefill:
            return Sums(decode, rows, attended, 0.0, 0.0, 0.0, True, 0.0)
        pairs, context = sum(batch.prefill_pairs.tolist()), sum(batch.prefill_context.tolist())
        if self._padded and context > prefill / 2:
            # k chunks alike of n tokens with c rows: pairs = k n (c - n / 2 + 1 / 2), and the rectangles are k n c.
            pairs = (pairs - prefill / 2) * context / (context - prefill / 2)
        chosen = min(pairs, self._top_k * prefill)
        return Sums(
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

    def _prefill(
        self,
        x: Any,
        sums: Sums,
        tokens: float | np.ndarray,
        pairs: float | np.ndarray,
        chosen: float | np.ndarray,
        context: float | np.ndarray,
    ) -> None:
        """x: a column, or those of all ranks. tokens: the step's prefill tokens that are here; pairs: theirs, or, of
        these, those that the indexer leaves; context: rows that they reach."""
        if sums.dense:
            x[_PREFILL] = tokens
            x[_PAIRS] = pairs
            x[_CONTEXT] = context
            x[_EXPANDED] = self._in_graph(float(np.max(context)), x, sums) if self._graphed else context
            x[_ROUNDS] = np.ceil(context / self._block)
        else:
            x[_SPARSE] = tokens
            x[_SPARSE_ROWS] = chosen
            x[_CHOOSING] = 1.0

    def _in_graph(self, context: float, x: Any, sums: Sums) -> float:
        """Rows that each rank up-projects where steps are captured, as runtime/shapes.py sizes them: what as many
        prompt tokens without a past have, a quarter more, or a block. Beyond a block nothing is captured."""
        tokens = max(float(np.max(x[_HERE])) if self._layout is Layout.DP else sums.tokens, LEAST_ROWS)
        apart = min(2.0 ** math.floor(math.log2(tokens)) / 4, MOST_APART)
        whole = math.ceil(tokens / apart) * apart
        sizes = (min(size, float(self._block)) for size in (whole, 1.25 * whole, math.inf))
        return next((size for size in sizes if context <= size), context)

    def _tp(self, x: Column, batch: Batch, sums: Sums) -> np.ndarray:
        x[_HERE] = sums.decode + sums.prefill
        x[_BUSY] = float(x[_HERE] > 0)
        x[_ABSORBED] = x[_READ] = sums.decode
        x[_ABSORBING] = x[_DECODING]
        x[_ROWS] = sums.attended
        x[_INDEX_PAIRS] = sums.rows + sums.pairs
        x[_INDEX_ROWS] = sums.rows
        if sums.prefill:
            self._prefill(x, sums, sums.prefill, sums.pairs, sums.chosen, sums.context)
            x[_INDEX_ROWS] += sums.context
        return np.array(x)[:, None]

    def _dp(self, column: Column, batch: Batch, sums: Sums) -> np.ndarray:
        decode = batch.decode_tokens
        column[_ABSORBING] = column[_BUSY] = float(min(decode.tolist()) > 0)
        x = self._everywhere(column)
        x[_ABSORBED] = x[_READ] = x[_HERE] = decode
        if sums.rows:
            x[_ROWS] = self._own_rows(batch, sums)
        x[_INDEX_PAIRS] = x[_INDEX_ROWS] = batch.decode_context
        if sums.prefill:
            tokens = batch.prefill_tokens
            x[_HERE] = decode + tokens
            x[_INDEX_PAIRS] += batch.prefill_pairs
            x[_INDEX_ROWS] += batch.prefill_context
            # A rank has its own requests only, so the pairs are distributed as theirs, not as tokens; and however long
            # theirs are, a token attends to no more rows than the indexer leaves.
            pairs = batch.prefill_pairs * (sums.pairs / np.add.reduce(batch.prefill_pairs))
            chosen = pairs if sums.dense else np.minimum(pairs, self._top_k * tokens)
            self._prefill(x, sums, sums.prefill * (tokens / sums.prefill), pairs, chosen, batch.prefill_context)
        if not column[_BUSY]:  # not everywhere
            x[_ABSORBING], x[_BUSY] = decode > 0, x[_HERE] > 0
        return x

    def _own_rows(self, batch: Batch, sums: Sums) -> np.ndarray:
        """[N] rows that decode tokens attend to where each rank has those of its own requests."""
        if self._padded or math.isinf(self._top_k):
            return batch.decode_context * (sums.attended / sums.rows)
        return np.minimum(batch.decode_context, self._top_k * batch.decode_tokens)

    def _cp(self, column: Column, batch: Batch, sums: Sums) -> np.ndarray:
        ranks, decode = self._ranks, batch.decode_tokens
        column[_FETCHED] = sums.context * (ranks - 1) / ranks
        column[_FETCHES] = math.ceil(sums.context / self._block)
        column[_ABSORBING] = column[_BUSY] = float(min(decode.tolist()) > 0)
        x = self._everywhere(column)
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
            share = np.empty(ranks)
            share[:] = (1 - largest / sums.prefill) / (ranks - 1)
            share[0] = largest / sums.prefill
            tokens, pairs = sums.prefill * share, sums.pairs * share
            x[_HERE] = decode + tokens
            # Who has no query needs no keys.
            context = sums.context if largest < sums.prefill else sums.context * (share > 0)
            x[_INDEX_PAIRS] += pairs
            x[_INDEX_ROWS] += context
            self._prefill(x, sums, tokens, pairs, pairs if sums.dense else sums.chosen * share, context)
        if not column[_BUSY]:  # not everywhere
            x[_ABSORBING], x[_BUSY] = decode > 0, x[_HERE] > 0
        return x

    def _dop(self, column: Column, batch: Batch, sums: Sums) -> np.ndarray:
        ranks, decode = self._ranks, batch.decode_tokens
        column[_HERE] = sums.decode + sums.prefill
        column[_BUSY] = float(column[_HERE] > 0)
        column[_ABSORBED] = sums.decode
        column[_ABSORBING] = column[_DECODING]
        crossing = sums.context - sums.prefill
        if sums.prefill:
            column[_FETCHES] = math.ceil(sums.context / self._block) if crossing else 0.0
            self._prefill(column, sums, sums.prefill, sums.pairs, sums.chosen, sums.context)
        x = self._everywhere(column)
        x[_READ] = decode
        if sums.rows:
            x[_ROWS] = self._own_rows(batch, sums)
        x[_CROSSING] = np.maximum(decode * (ranks - 1), sums.decode - decode) / ranks
        x[_INDEX_PAIRS] = x[_INDEX_ROWS] = batch.decode_context
        if sums.prefill:
            before = batch.prefill_context - batch.prefill_tokens
            x[_FETCHED] = np.maximum(before * (ranks - 1), crossing - before)
            x[_INDEX_PAIRS] += batch.prefill_pairs
            # Keys are read where they lie.
            x[_INDEX_ROWS] = batch.decode_context + sums.context + (batch.prefill_context - sums.context)
        return x
