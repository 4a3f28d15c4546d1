"""Chooses and scores tokens over a vocabulary that is cut over the ranks, without gathering logits.

W wanted rows, S of them drawn at random, V ids on this rank, N ranks, K alternatives reported.

A row is greedy (temperature 0: the largest logit), drawn, or scored only (it has a target). A draw is the argmax of
logit / temperature + Gumbel noise over the ids that the filters keep, so each shard finds its own best and the best of
N wins. Every tie goes to the lowest id, except at a filter's threshold, where ties stay together. Filters (min_p and
top_k against the whole vocabulary, then top_p over what they leave) compare logits as they came, in exact order.
Penalties, bias and masks (controls.py) come before all that; log-probabilities are of the logits as they came.

Messages: one all-gather; with filters a second one, and for top_p an all-reduce of [S, 256] int64 for each byte of a
logit (likewise for top_k above MAX_CANDIDATES). All ranks make the same calls: which stages run follows from facts of
the plan alone. Results are the same on every rank, and the choice does not depend on how the vocabulary is cut.

NaN and +inf mean broken weights or a bug. Nothing is raised here, where looking would make the host wait: such an id is
never chosen unless it is the row's target, and the row's log-probabilities are NaN. A row without one finite logit
gets id 0 (or its target) and NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splash_trt.dist.collectives import Collectives
from splash_trt.plan import SAMPLE
from splash_trt.runtime import noise
from splash_trt.runtime.to_device import to_device

MAX_CANDIDATES = 256
"""Up to this top_k the ranks gather candidates; above it the message would grow, and the threshold is searched for."""

_MIN_TEMPERATURE = 1e-30  # keeps logit / temperature finite; far below any gap between two logits already
_RADIX_BITS = 8
# Elements of a block of columns. Bounds the memory of what is made on the way: on a CPU, filling fresh pages of whole
# [S, V] arrays took three times as long as the arithmetic.
_BLOCK = 1 << 20
_DEVICE_BLOCK = 1 << 22  # of 32 MB in float64, which a GPU's cache holds; less would be more launches than work
_NEVER = float("-inf")


@dataclass(frozen=True, kw_only=True, eq=False)
class RowParams:
    """How each wanted row is to be treated. Tensors for the arithmetic, plain values for what decides which stages run.

    The plain values come from the plan, so they are the same on all ranks.
    """

    target: Tensor
    """[W] int64: SAMPLE, or the id to score."""
    rows: Tensor | None
    """[S] int64, ascending: the rows that are drawn; None when all W are."""
    temperature: Tensor
    """[S] float64, above 0."""
    top_p: Tensor
    """[S] float64, above 0; at least 1 is off."""
    min_p: Tensor
    """[S] float64, 0 to 1."""
    top_k: Tensor
    """[S] int64, 0 is off."""
    seed: Tensor
    """[S] int64."""
    position: Tensor
    """[S] int64: the position that the drawn token will take."""
    num_drawn: int
    any_greedy: bool
    any_target: bool
    max_top_k: int
    """0: no row has one."""
    any_top_p: bool
    any_min_p: bool
    need_logprobs: bool
    num_top: int
    """K."""

    @classmethod
    def build(
        cls, table: np.ndarray, position: np.ndarray, target: np.ndarray, device: torch.device | str = "cpu"
    ) -> RowParams:
        """From the host's arrays.

        table: [W] of SAMPLING_DTYPE, each wanted row's parameters. position: [W], the position that the token chosen
        there will take. target: [W] int64, as Plan.want_target.
        """
        free = target == SAMPLE
        rows = np.flatnonzero(free & (table["temperature"] > 0))
        drawn = table[rows]
        reals = np.stack([np.maximum(drawn["temperature"], _MIN_TEMPERATURE), drawn["top_p"], drawn["min_p"]])
        whole = np.stack([drawn["top_k"], drawn["seed"], position[rows], rows]).astype(np.int64)
        packed = np.concatenate([target.astype(np.int64), whole.ravel(), reals.view(np.int64).ravel()])  # one copy
        target_, whole_, reals_ = to_device(packed, device).split([len(target), whole.size, reals.size])
        top_k, seed, position_, rows_ = whole_.view(whole.shape).unbind()
        temperature, top_p, min_p = reals_.view(torch.float64).view(reals.shape).unbind()
        return cls(
            target=target_,
            rows=None if len(rows) == len(table) else rows_,
            temperature=temperature,
            top_p=top_p,
            min_p=min_p,
            top_k=top_k,
            seed=seed,
            position=position_,
            num_drawn=len(rows),
            any_greedy=bool(np.any(free & (table["temperature"] <= 0))),
            any_target=not bool(free.all()),
            max_top_k=int(drawn["top_k"].max(initial=0)),
            any_top_p=bool(np.any(drawn["top_p"] < 1)),
            any_min_p=bool(np.any(drawn["min_p"] > 0)),
            need_logprobs=bool(np.any(table["logprobs"] >= 0) or not free.all()),
            num_top=int(table["logprobs"].max(initial=0)),
        )

    @property
    def filtered(self) -> bool:
        return self.max_top_k > 0 or self.any_top_p or self.any_min_p

    def of_drawn(self, x: Tensor) -> Tensor:
        """x [W, ...] → [S, ...]."""
        return x if self.rows is None else x[self.rows]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """The same on every rank."""

    tokens: Tensor
    """[W] int64: the chosen id, or the target."""
    logprob: Tensor
    """[W] float64: natural log of its probability, before temperature and filters; NaN when nobody asked."""
    top_token: Tensor
    """[W, K] int64: the likeliest ids, best first. K is num_top or the whole vocabulary, whichever is less."""
    top_logprob: Tensor
    """[W, K] float64."""


def column_blocks(x: Tensor) -> list[slice]:
    """Ranges that cover x's columns, each of about _BLOCK (on a GPU _DEVICE_BLOCK) elements of x [W, V]."""
    step = max(1, (_BLOCK if x.device.type == "cpu" else _DEVICE_BLOCK) // len(x))
    return [slice(start, start + step) for start in range(0, x.shape[1], step)]


def ordered_keys(x: Tensor) -> Tensor:
    """Integers of x's shape and width, ordered as x (float32 or float64 without NaN); both zeros get one key.

    IEEE 754 bits of numbers from 0 up are ordered as integers; below 0 their order is reversed.
    """
    whole = {torch.float32: torch.int32, torch.float64: torch.int64}[x.dtype]
    bits = (x + 0.0).view(whole)
    return bits.bitwise_xor_((bits >> (torch.iinfo(whole).bits - 1)).bitwise_and_(torch.iinfo(whole).max))


def heaviest(x: Tensor, weight: Tensor, need: Callable[[Tensor], Tensor], reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """[S, V] bool: the smallest set of the largest x that weighs `need` over all shards; equal x stay together.

    x: [S, V] as for ordered_keys. weight: [S, V] int64; integers, because their sum does not depend on its order.
    need: from the total weight [S, 1] to what is needed [S, 1], not above it. reduce: sums [S, 256] int64 over ranks.
    The key of the smallest x in the set is found by eight bits in each round.
    """
    keys = ordered_keys(x)
    num_bins = 1 << _RADIX_BITS
    top_shift = x.element_size() * 8 - _RADIX_BITS
    base = weight.new_full((len(keys), 1), -num_bins // 2)  # the lowest value that the bits so far leave possible
    left = base
    for shift in range(top_shift, -1, -_RADIX_BITS):
        if shift != top_shift:
            base = base << _RADIX_BITS
        histogram = weight.new_zeros((len(keys), num_bins + 2))
        for block in column_blocks(keys):
            # Bins 0 and num_bins + 1 take the keys below and above those still possible. A difference of 64-bit keys
            # that wraps lands in one of them too.
            place = (keys[:, block] >> shift).long().sub_(base - 1).clamp_(0, num_bins + 1)
            histogram.scatter_add_(1, place, weight[:, block])
        from_top = reduce(histogram[:, 1:-1].flip(1).contiguous()).cumsum(1)
        if shift == top_shift:
            left = need(from_top[:, -1:])
        # A bin that does not reach `left` from the top is passed; when nothing weighs anything, none is.
        passed = (from_top < left).sum(1, keepdim=True)
        left = left - torch.nn.functional.pad(from_top, (1, 0)).gather(1, passed)
        base = base + (num_bins - 1 - passed)
    return keys >= base


def top_of_shard(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of x [W, V], k <= V: values [W, k] and columns [W, k] int64, ties to the lowest column.

    torch.topk alone promises neither which of several equal values it returns nor their order.
    """
    values, columns = x.topk(k, dim=1)
    kth, width = values[:, -1:], x.shape[1]
    descending = torch.arange(width, 0, -1, dtype=torch.int32, device=x.device)
    tied = torch.where(x == kth, descending, 0).topk(k, dim=1).values  # width - column of the lowest columns
    # The columns above the k-th value, in order, then those that tie with it; only k of them are wanted.
    above = torch.where(values > kth, columns, width).sort(dim=1).values
    num_above = (above < width).sum(1, keepdim=True)
    place = torch.arange(k, device=x.device)[None]
    columns = torch.where(place < num_above, above, width - tied.gather(1, (place - num_above).clamp(min=0)))
    values, order = x.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


def _pad_columns(x: Tensor, width: int, value: float) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[1]), value=value)


class Sampler:
    """One rank's part: ids first_id … first_id + V - 1 of vocab_size."""

    def __init__(self, collectives: Collectives, first_id: int, vocab_size: int) -> None:
        assert 0 <= first_id <= vocab_size
        self._collectives = collectives
        self._first_id = first_id
        self._vocab_size = vocab_size
        # A power of two, so that masses are scaled exactly; vocab_size of them sum to less than 2**62.
        self._mass_unit = 2.0 ** (62 - vocab_size.bit_length())
        self._id_steps: Tensor | None = None

    def __call__(self, logits: Tensor, params: RowParams, adjust: Callable[[Tensor], Tensor] | None = None) -> Sampled:
        """logits: [W, V] of this rank, float32 or float64 (the same on all ranks); V differs by rank and may be 0.

        adjust: from this shard's logits [W, V], which it leaves as they are, to those to choose from; on all ranks or
        on none. An id that has -inf there is not chosen, unless all have.
        """
        num_top = min(params.num_top, self._vocab_size)
        if len(logits) == 0:
            none = params.target.new_zeros(0, num_top)
            return Sampled(
                tokens=params.target, logprob=params.target.double(), top_token=none, top_logprob=none.double()
            )
        first_id = self._first_id
        if logits.shape[1] == 0:
            # An empty shard stands as one impossible id past the vocabulary, which loses every tie.
            logits, first_id, adjust = logits.new_full((len(logits), 1), _NEVER), self._vocab_size, None
        clean = logits.nan_to_num(nan=_NEVER, posinf=_NEVER, neginf=_NEVER)
        choice = clean if adjust is None else adjust(clean)
        columns = self._statistics(logits, clean, first_id, params)
        if not params.filtered:
            merged = self._gather(columns | self._choice(logits, choice, first_id, params, None))
        else:
            merged = self._gather(columns | self._thresholds(choice, params))
            keep = self._kept(params.of_drawn(choice), params, merged)
            merged |= self._gather(self._choice(logits, choice, first_id, params, keep))
        return self._conclude(params, merged, num_top)

    def _gather(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Each column [...] float64 of every rank, in one message: [N, ...]."""
        flat = torch.cat([x.reshape(-1) for x in columns.values()])
        size = self._collectives.size
        gathered = self._collectives.all_gather(flat, [len(flat)] * size).view(size, len(flat))
        parts = gathered.split([x.numel() for x in columns.values()], dim=1)
        return {name: part.reshape(size, *x.shape) for (name, x), part in zip(columns.items(), parts, strict=True)}

    def _statistics(self, logits: Tensor, clean: Tensor, first_id: int, params: RowParams) -> dict[str, Tensor]:
        """What can be said of this shard before any choice, only as far as the rows need it."""
        columns: dict[str, Tensor] = {}
        width = clean.shape[1]
        if params.need_logprobs:
            peak = clean.amax(1, keepdim=True)
            columns["peak"] = peak[:, 0].double()
            origin = torch.where(peak == _NEVER, 0.0, peak)
            masses = [(logits[:, b] - origin).exp_().sum(1, dtype=torch.float64) for b in column_blocks(logits)]
            columns["mass"] = torch.stack(masses).sum(0)
        num_top = min(params.num_top, self._vocab_size)
        if num_top:
            value, column = top_of_shard(clean, min(num_top, width))
            columns["top_value"] = _pad_columns(value.double(), num_top, _NEVER)
            columns["top_id"] = _pad_columns((column + first_id).double(), num_top, self._vocab_size)
        return columns

    def _thresholds(self, choice: Tensor, params: RowParams) -> dict[str, Tensor]:
        """What the filters need to know of this shard."""
        x = params.of_drawn(choice)
        columns = {"best": x.amax(1).double()}
        k = min(params.max_top_k, self._vocab_size)
        if 0 < k <= MAX_CANDIDATES:
            value = x.topk(min(k, x.shape[1]), dim=1).values
            columns["candidate"] = _pad_columns(value.double(), k, _NEVER)
        return columns

    def _kept(self, x: Tensor, params: RowParams, merged: dict[str, Tensor]) -> Tensor:
        """[S, V] bool: what the filters leave of x [S, V].

        top_p weighs in whole numbers, in units of 2**(vocab_size.bit_length() - 62) of the likeliest id's mass.
        """
        keep = torch.ones_like(x, dtype=torch.bool)
        if params.max_top_k:
            keep = self._among_top_k(x, params, merged)
        if not (params.any_min_p or params.any_top_p):
            return keep
        peak = merged["best"].amax(0)[:, None].clamp(min=torch.finfo(torch.float64).min)
        temperature, lowest, top_p = params.temperature[:, None], params.min_p.log()[:, None], params.top_p[:, None]
        mass = torch.empty_like(x, dtype=torch.int64) if params.any_top_p else None
        for block in column_blocks(x):
            tempered = (x[:, block] - peak).div_(temperature)  # at most 0; float64, as peak is
            keep[:, block] &= tempered >= lowest
            if mass is not None:
                mass[:, block] = tempered.exp_().mul_(self._mass_unit).mul_(keep[:, block])
        if mass is not None:

            def need(total: Tensor) -> Tensor:
                return (top_p * total).ceil().long().clamp(min=1).minimum(total)

            keep &= heaviest(x, mass, need, self._collectives.all_reduce) | (top_p >= 1)
        return keep

    def _among_top_k(self, x: Tensor, params: RowParams, merged: dict[str, Tensor]) -> Tensor:
        """[S, V] bool: x is no less than its row's k-th largest."""
        k = torch.where(params.top_k > 0, params.top_k.clamp(max=self._vocab_size), self._vocab_size)[:, None]
        if "candidate" not in merged:
            return heaviest(x, torch.ones_like(x, dtype=torch.int64), k.minimum, self._collectives.all_reduce)
        best = merged["candidate"].transpose(0, 1).flatten(1).sort(dim=1, descending=True).values
        kth = best.gather(1, k.clamp(max=best.shape[1]) - 1)
        return (x >= kth) | (params.top_k == 0)[:, None]

    def _choice(
        self, logits: Tensor, choice: Tensor, first_id: int, params: RowParams, keep: Tensor | None
    ) -> dict[str, Tensor]:
        """This shard's candidate for each row: its score (the best wins), id and logit as it came, each [W]."""
        pick = torch.zeros_like(params.target)
        score = logits.new_zeros(len(pick), dtype=torch.float64)
        if params.any_greedy:
            pick = choice.argmax(1)
            score = choice.gather(1, pick[:, None])[:, 0].double()
        if params.num_drawn:
            where = slice(None) if params.rows is None else params.rows
            score[where], pick[where] = self._draw(params.of_drawn(choice), params, first_id, keep)
        if params.any_target:
            column = params.target - first_id
            here = (column >= 0) & (column < choice.shape[1])
            scored = params.target != SAMPLE
            pick = torch.where(scored & here, column, pick)
            score = torch.where(scored, torch.where(here, 0.0, _NEVER), score)
        logit = logits.gather(1, pick[:, None])[:, 0]
        return {"score": score, "id": (pick + first_id).double(), "logit": logit.double()}

    def _draw(self, x: Tensor, params: RowParams, first_id: int, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of each row of x [S, V] the best noisy value [S] float64 among those kept, and its column [S]."""
        steps = self._id_steps
        if steps is None or len(steps) != x.shape[1] or steps.device != x.device:
            steps = self._id_steps = noise.id_steps(first_id, x.shape[1], x.device)
        keys = noise.row_keys(params.seed, params.position)
        best, pick = x.new_full((len(x),), _NEVER, dtype=torch.float64), torch.zeros_like(params.seed)
        for block in column_blocks(x):
            noisy = noise.gumbel(keys, steps[block]).add_(x[:, block] / params.temperature[:, None])
            if keep is not None:
                noisy.masked_fill_(~keep[:, block], _NEVER)
            value, column = noisy.max(1)  # the first of equals, as is documented of max and argmax
            pick = torch.where(value > best, column + block.start, pick)
            best = torch.maximum(best, value)
        return best, pick

    def _conclude(self, params: RowParams, merged: dict[str, Tensor], num_top: int) -> Sampled:
        """The shards' candidates [N, W] and statistics put together."""
        score, ids = merged["score"], merged["id"]
        token, winner = torch.where(score == score.amax(0), ids, float(self._vocab_size)).min(0)
        logprob = torch.full_like(token, float("nan"))
        top_token = params.target.new_zeros(len(token), num_top)
        top_logprob = token.new_full((len(token), num_top), float("nan"))
        if params.need_logprobs:
            peak = merged["peak"].amax(0)
            mass = (merged["mass"] * (merged["peak"] - peak).exp()).sum(0)
            log_sum = peak + mass.masked_fill(mass.isinf(), float("nan")).log()
            logprob = merged["logit"].gather(0, winner[None])[0] - log_sum
            if num_top:
                top_id, by_id = merged["top_id"].transpose(0, 1).flatten(1).sort(dim=1)
                value = merged["top_value"].transpose(0, 1).flatten(1).gather(1, by_id)
                value, order = value.sort(dim=1, descending=True, stable=True)
                top_token = top_id.gather(1, order)[:, :num_top].long()
                top_logprob = value[:, :num_top] - log_sum[:, None]
        return Sampled(tokens=token.long(), logprob=logprob, top_token=top_token, top_logprob=top_logprob)
