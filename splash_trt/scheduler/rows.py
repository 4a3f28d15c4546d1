"""Collects the rows of one step and turns them into a Plan."""

from __future__ import annotations

import numpy as np

from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.partition import rank_counts, token_ranks
from splash_trt.plan import LAST_SAMPLED, SAMPLE, SAMPLING_DTYPE, Plan, SlotControls, encode_controls
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
        self._slot: list[np.ndarray] = [decodes]
        self._start: list[np.ndarray] = [slots.computed[decodes]]
        self._count: list[np.ndarray] = [np.ones(n, np.int64)]
        self._token: list[np.ndarray] = [np.full(n, LAST_SAMPLED, np.int64)]
        self._want: list[np.ndarray] = [np.arange(n)]
        self._target: list[np.ndarray] = [np.full(n, SAMPLE, np.int64)]
        self.num_tokens = n
        slots.computed[decodes] += 1
        slots.total[decodes] += 1

    def prefill(self, slot: int, count: int) -> None:
        """The next `count` known tokens of a slot; the last known one is sampled from."""
        slots, sequence = self._slots, self._slots.sequence(slot)
        start = int(slots.computed[slot])
        end = start + count
        self._slot.append(np.array([slot]))
        self._start.append(np.array([start]))
        self._count.append(np.array([count]))
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
        """The rows so far as plan `step`, with what the ledger and the switch have for it."""
        config = self._config
        slot = np.concatenate(self._slot).astype(np.int32)
        start = np.concatenate(self._start).astype(np.int32)
        count = np.concatenate(self._count).astype(np.int32)
        home = self._slots.home[slot]
        absorbed = count <= config.most_absorbed(self._layout)
        ranks = token_ranks(
            self._layout, home, start, count, absorbed, num_ranks=config.num_ranks, page_tokens=config.page_tokens
        )
        counts = rank_counts(ranks, self.num_tokens, config.num_ranks)
        moves, weights = switcher.take_moves()
        local = np.array(changes.local_moves, np.int32).reshape(-1, 6)
        return Plan(
            step=step,
            epoch=switcher.epoch,
            layout=self._layout,
            slot=slot,
            start=start,
            count=count,
            home=home,
            absorbed=absorbed,
            token=np.concatenate(self._token),
            want_index=np.concatenate(self._want).astype(np.int32),
            want_target=np.concatenate(self._target),
            counts=counts,
            bucket=int(counts.max()),
            tables=stacked(changes.tables),
            sampling=_sampling(changes.opened),
            controls=encode_controls([_controls(s) for s in changes.opened if s.request.sampling.controlled]),
            controlled=np.flatnonzero(self._slots.controlled).astype(np.int32),
            moves=np.concatenate([local, moves]),
            attempt=switcher.attempt,
            armed=switcher.armed(slot),
            target_tables=stacked(changes.target_tables),
            late_moves=switcher.late_moves(slot, start, count, absorbed),
            weights=weights,
        )


def _sampling(admitted: list[Sequence]) -> np.ndarray:
    """[P] of SAMPLING_DTYPE for sequences that have just got their slots."""
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
