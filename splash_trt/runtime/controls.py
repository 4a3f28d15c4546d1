"""The controls of sampling that need state (grammars, min_tokens, logit_bias, penalties): what a rank keeps for each
slot, and what they do to logits.

The order is vLLM's (v1/sample/sampler.py and its bitmask before that): grammar, min_tokens, logit_bias, penalties. Here
the masks (grammar, min_tokens) come last, with the same result: they set -inf, and nothing after them would undo that.

State is kept for slots that use a control, and dropped when a plan no longer lists the slot. It follows from the tokens
that were known when the slot was opened and those sampled since, which every rank knows. So neither a preemption nor
another layout changes it, and ranks need not exchange it. V ids of this rank, W wanted rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splash_trt.plan import SAMPLE, Plan, SlotControls
from splash_trt.runtime.grammar import GrammarCompiler, Matcher
from splash_trt.runtime.penalties import Penalties, Share
from splash_trt.runtime.to_device import to_device

_NEVER = float("-inf")


@dataclass(frozen=True, eq=False)
class _Slot:
    bias_ids: np.ndarray
    """[n] int64."""
    bias: np.ndarray
    """[n] float64."""
    ends: np.ndarray
    """[n] int64: ids that end the output."""
    free_from: int
    """The first position at which it may end."""
    matcher: Matcher | None
    error: str
    """Why there is no matcher, though there is a grammar."""


class _Entries:
    """Single elements (row, id) of the wanted rows with a value each, those of this rank."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._rows: list[np.ndarray] = []
        self._columns: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def add(self, row: int, ids: np.ndarray, values: np.ndarray) -> None:
        here, column = self._share.columns(ids)
        self._rows.append(np.full(len(here), row))
        self._columns.append(column)
        self._values.append(values[here])

    def add_to(self, x: Tensor) -> None:
        if self._rows:
            row, column = to_device(np.stack([np.concatenate(self._rows), np.concatenate(self._columns)]), x.device)
            x[row, column] += to_device(np.concatenate(self._values), x.device).to(x.dtype)


class Adjustment:
    """What one step does to the logits of this rank. errors: by wanted row, why no id can be chosen there."""

    def __init__(self, share: Share, penalties: Penalties, rows: np.ndarray, slots: np.ndarray) -> None:
        """rows [R]: the controlled ones of the wanted rows; slots [R]."""
        self._penalties = penalties
        self._rows = rows
        self._slots = slots
        self._share = share
        self.bias = _Entries(share)
        self.ends = _Entries(share)
        self.errors: dict[int, str] = {}
        self._masked: list[int] = []
        self._masks: list[np.ndarray] = []

    def mask(self, row: int, allowed: np.ndarray) -> None:
        """Only ids whose bit is set in allowed [words] int32 may be chosen in this row."""
        first, end = self._share.first_id, self._share.first_id + self._share.width
        bits = allowed.view(np.uint8)[first // 8 : -(-end // 8)]
        self._masked.append(row)
        self._masks.append(np.pad(bits, (0, -(-end // 8) - first // 8 - len(bits))))  # the tokenizer may know fewer ids

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [W, V] → those to choose from."""
        x = logits.clone()
        self.bias.add_to(x)
        self._penalties.apply(x, self._rows, self._slots)
        self.ends.add_to(x)
        if self._masked:
            rows = to_device(np.array(self._masked), x.device)
            octets = to_device(np.stack(self._masks), x.device)[:, :, None]
            bits = (octets >> torch.arange(8, dtype=torch.uint8, device=x.device)).bitwise_and_(1).flatten(1)
            allowed = bits[:, self._share.first_id % 8 :][:, : self._share.width]
            x[rows] = x[rows].masked_fill_(allowed == 0, _NEVER)
        return x


class Controls:
    """One rank's state. compiler: makes matchers; where there is none, its absence's reason. device: of the logits."""

    def __init__(
        self,
        share: Share,
        max_slots: int,
        eos_token_ids: tuple[int, ...],
        compiler: GrammarCompiler | str,
        device: torch.device | str = "cpu",
    ) -> None:
        self._share = share
        self._eos = eos_token_ids
        self._compiler = compiler
        self._penalties = Penalties(share, max_slots, device)
        self._controlled = np.zeros(max_slots, np.bool_)
        self._slots: dict[int, _Slot] = {}

    def apply(self, plan: Plan) -> None:
        """Take over what a plan says of slots, before its rows run."""
        if self._slots:
            keep = set(plan.controlled.tolist()) - set(plan.sampling["slot"].tolist())
            for slot in [slot for slot in self._slots if slot not in keep]:
                self._close(slot)
        for entry in plan.slot_controls:
            self._open(entry)

    def adjustment(self, slot: np.ndarray, position: np.ndarray, target: np.ndarray) -> Adjustment | None:
        """Of a step's wanted rows; None if no row that chooses is controlled.

        slot [W]; position [W]: what the chosen token will take; target [W]: as Plan.want_target.
        """
        rows = np.flatnonzero(self._controlled[slot] & (target == SAMPLE))
        if not len(rows):
            return None
        out = Adjustment(self._share, self._penalties, rows, slot[rows])
        for row in rows.tolist():
            state = self._slots[int(slot[row])]
            if len(state.bias_ids):
                out.bias.add(row, state.bias_ids, state.bias)
            bound = position[row] < state.free_from
            if state.matcher is not None:
                self._mask(out, row, state, state.matcher, bound)
            elif bound:
                out.ends.add(row, state.ends, np.full(len(state.ends), _NEVER))
            if state.error:
                out.errors[row] = state.error
        return out

    def remember(self, slots: np.ndarray, tokens: Tensor) -> None:
        """slots [n], each another, have been given tokens [n] int64, which are where the logits are."""
        here = np.flatnonzero(self._controlled[slots])
        if not len(here):
            return
        slots, tokens = slots[here], tokens[to_device(here, tokens.device)]
        self._penalties.count(slots, tokens)
        matchers = [self._slots[slot].matcher for slot in slots.tolist()]
        if any(matchers):  # the host waits for the ids: the next masks follow from them
            for matcher, token in zip(matchers, tokens.tolist(), strict=True):
                if matcher is not None:
                    matcher.consume([token])

    def _mask(self, out: Adjustment, row: int, state: _Slot, matcher: Matcher, bound: bool) -> None:
        """bound: ids that end the output are not to be chosen, if there are others."""
        assert isinstance(self._compiler, GrammarCompiler)
        allowed = np.zeros(self._compiler.num_words, np.int32)
        error = matcher.fill(allowed)
        if error:
            out.errors[row] = f"grammar: {error}"
        if bound:
            going_on = allowed.copy()
            for token in state.ends[state.ends < 32 * len(allowed)].tolist():
                going_on.view(np.uint32)[token >> 5] &= ~np.uint32(1 << (token & 31))
            allowed = going_on if going_on.any() else allowed
        out.mask(row, allowed)

    def _open(self, entry: SlotControls) -> None:
        prompt, output = (np.frombuffer(ids, np.int32) for ids in (entry.prompt, entry.output))
        matcher, error = None, ""
        if entry.grammar is not None:
            try:
                if isinstance(self._compiler, str):
                    raise ValueError(self._compiler)
                matcher = self._compiler.matcher(entry.grammar, output.tolist())
            except ValueError as reason:  # whoever sent it has not checked; the request ends with this
                error = str(reason)
        if entry.penalties is not None:
            self._penalties.open(entry.slot, entry.penalties, prompt, output)
        self._controlled[entry.slot] = True
        self._slots[entry.slot] = _Slot(
            bias_ids=np.array(list(entry.logit_bias), np.int64),
            bias=np.array(list(entry.logit_bias.values()), np.float64),
            ends=np.array(sorted({*self._eos, *entry.stop_token_ids}), np.int64),
            free_from=entry.free_from,
            matcher=matcher,
            error=error,
        )

    def _close(self, slot: int) -> None:
        self._penalties.close(slot)
        self._controlled[slot] = False
        del self._slots[slot]
