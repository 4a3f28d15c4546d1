"""Collects the rows of one step (a row is the tokens of one request) and turns them into a Plan."""

from __future__ import annotations

import numpy as np

from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.partition import rank_counts, token_ranks
from splash_trt.plan import LAST_SAMPLED, NO_SAMPLING, SAMPLE, SAMPLING_DTYPE, Plan, SlotControls, encode_controls
from splash_trt.scheduler.ledger import Changes, stacked
from splash_trt.scheduler.sequence import Sequence
from splash_trt.scheduler.slots import Slots
from splash_trt.scheduler.switcher import Switcher


class RowBuilder:
    """First the decodes, in slot order and all at once, then prefill chunks one by one."""

    def __init__(self, config: EngineConfig, layout: Layout, slots: Slots, decodes: np.ndarray) -> None:
        self._config = config
        self._layout = layout
        self._slots = slots
        n = len(decodes)
        self._decodes = decodes
        self._start = slots.computed[decodes]
        self._chunks: list[tuple[int, int, int]] = []  # slot, start, count
        self._token: list[np.ndarray] = [np.full(n, LAST_SAMPLED, np.int64)]
        self._want: list[np.ndarray] = [np.arange(n)]
        self._target: list[np.ndarray] = [np.full(n, SAMPLE, np.int64)]
        self.num_tokens = n
        slots.computed[decodes] = self._start + 1
        slots.total[decodes] += 1

    def prefill(self, slot: int, count: int) -> None:
        """Add the next `count` known tokens of a slot. The step samples from a request's last known token."""
        slots, sequence = self._slots, self._slots.sequence(slot)
        start = int(slots.computed[slot])
        end = start + count
        self._chunks.append((slot, start, count))
        self._token.append(sequence.known(start, end))
        if sequence.request.sampling.prompt_logprobs is not None:
            first = max(start, sequence.scored)
            last = max(first, min(end, len(sequence.request.prompt) - 1))
            self._want.append(self.num_tokens + np.arange(first, last) - start)
            self._target.append(sequence.known(first + 1, last + 1))
            sequence.scored = max(sequence.scored, last)
        if end == slots.admitted[slot]:
            self._want.append(np.array([self.num_tokens + count - 1]))
            self._target.append(np.array([SAMPLE]))
            slots.total[slot] += 1
        slots.computed[slot] = end
        self.num_tokens += count

    def plan(self, step: int, changes: Changes, switcher: Switcher) -> Plan:
        """Plan `step` of the rows so far, the ledger's changes and what the switch moves."""
        config = self._config
        slot, start, count = self._rows()
        home = self._slots.home[slot]
        absorbed = count <= config.most_absorbed(self._layout)
        ranks = token_ranks(
            self._layout, home, start, count, absorbed, num_ranks=config.num_ranks, page_tokens=config.page_tokens
        )
        counts = rank_counts(ranks, self.num_tokens, config.num_ranks)
        moves, weights = switcher.take_moves()
        if changes.local_moves:
            moves = np.concatenate([np.array(changes.local_moves, np.int32), moves])
        return Plan(
            step=step,
            epoch=switcher.epoch,
            layout=self._layout,
            slot=slot,
            start=start,
            count=count,
            home=home,
            absorbed=absorbed,
            token=_joined(self._token),
            want_index=_joined(self._want).astype(np.int32),
            want_target=_joined(self._target),
            counts=counts,
            tables=stacked(changes.tables),
            sampling=_sampling(changes.opened),
            controls=encode_controls([_controls(s) for s in changes.opened if s.request.sampling.controlled]),
            controlled=self._slots.controlled.nonzero()[0].astype(np.int32),
            moves=moves,
            attempt=switcher.attempt,
            armed=switcher.armed(slot),
            target_tables=stacked(changes.target_tables),
            late_moves=switcher.late_moves(slot, start, count, absorbed),
            weights=weights,
        )

    def _rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[R] int32 each: slot, start, count."""
        decodes, n = self._decodes, len(self._decodes)
        rows = np.empty((3, n + len(self._chunks)), np.int32)
        rows[0, :n], rows[1, :n], rows[2, :n] = decodes, self._start, 1
        if self._chunks:
            rows[:, n:] = np.array(self._chunks).T
        return rows[0], rows[1], rows[2]


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _sampling(admitted: list[Sequence]) -> np.ndarray:
    """[P] of SAMPLING_DTYPE for sequences that have just got their slots."""
    if not admitted:
        return NO_SAMPLING
    out = np.zeros(len(admitted), SAMPLING_DTYPE)
    for entry, sequence in zip(out, admitted, strict=True):
        p = sequence.request.sampling
        tops = [n for n in (p.logprobs, p.prompt_logprobs) if n is not None]
        entry["slot"] = sequence.slot
        entry["temperature"], entry["top_k"] = p.temperature, min(p.top_k, np.iinfo(np.int32).max)
        entry["top_p"], entry["min_p"] = p.top_p, p.min_p
        entry["seed"] = sequence.request.seed
        entry["logprobs"] = max(tops, default=-1)
    return out


def _controls(sequence: Sequence) -> SlotControls:
    """For a sequence that has just got its slot."""
    request, known = sequence.request, np.array(sequence.tokens, np.int32)
    p, num_prompt = request.sampling, len(request.prompt)
    penalties = float(p.repetition_penalty), float(p.frequency_penalty), float(p.presence_penalty)
    return SlotControls(
        slot=sequence.slot,
        prompt=known[: num_prompt if p.repetition_penalty != 1 else 0].tobytes(),
        output=known[num_prompt:].tobytes(),
        penalties=penalties if p.penalised else None,
        logit_bias={token: float(value) for token, value in p.logit_bias.items()},
        stop_token_ids=tuple(p.stop_token_ids),
        free_from=min(num_prompt + p.min_tokens, np.iinfo(np.int32).max),
        grammar=p.grammar,
    )
