"""How many bytes a switch has to send between ranks, from plans alone: where each row is, and where it must be.

Written down anew: which rank computes which token, which ranks hold which page and which heads are spelled out here,
and nothing of the switch's own arithmetic is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from splash_trt.config import EngineConfig, Layout
from splash_trt.plan import Plan

ITEMSIZE = 8  # float64


def row_bytes(model: dict[str, Any]) -> int:
    """One token's latent part and rotated key, in all layers."""
    return ITEMSIZE * model["num_hidden_layers"] * (model["kv_lora_rank"] + model["qk_rope_head_dim"])


def head_bytes(model: dict[str, Any]) -> int:
    """One head's part of the four head-cut tensors, in all layers."""
    query = (model["qk_nope_head_dim"] + model["qk_rope_head_dim"]) * model["q_lora_rank"]
    absorbed = (model["qk_nope_head_dim"] + model["v_head_dim"]) * model["kv_lora_rank"]
    return ITEMSIZE * model["num_hidden_layers"] * (query + absorbed + model["v_head_dim"] * model["hidden_size"])


def weight_bytes(source: Layout, target: Layout, model: dict[str, Any], num_ranks: int) -> int:
    """Every rank lacks all heads but its own where they were cut and will not be: each head is sent N - 1 times."""
    whole = (Layout.DP, Layout.CP)
    comes_in = target in whole and source not in whole
    return (num_ranks - 1) * model["num_attention_heads"] * head_bytes(model) * comes_in


class Rows:
    """Rows of all requests: which ranks hold each now, and which hold or will hold it without being sent it.

    Takes all plans from the first one on, in order.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._size = config.page_tokens
        self._num_ranks = config.num_ranks
        self._now: dict[tuple[int, int], set[int]] = defaultdict(set)  # (slot, page): ranks
        self._then: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._rows: dict[int, list[set[int]]] = defaultdict(list)  # slot: of each row, the ranks that get it unsent
        self._attempt = 0
        self._epoch = 0
        self.late = 0
        """Rows computed while a switch was under way that were not written under both placements at once."""

    def take(self, plan: Plan) -> None:
        if plan.epoch != self._epoch:
            self._now, self._then = self._then, defaultdict(set)
            for slot, rows in self._rows.items():
                self._rows[slot] = [set(self._now[slot, i // self._size]) for i in range(len(rows))]
        elif plan.attempt != self._attempt:
            self._then = defaultdict(set)
        self._epoch, self._attempt = plan.epoch, plan.attempt
        for slot in plan.sampling["slot"].tolist():
            self._rows[slot] = []
            for tables in (self._now, self._then):
                for key in [key for key in tables if key[0] == slot]:
                    del tables[key]
        for tables, changes in ((self._now, plan.tables), (self._then, plan.target_tables)):
            for rank, slot, page, _ in changes.tolist():
                tables[slot, page].add(rank)
        for row in range(plan.num_rows):
            self._compute(plan, row)

    def _compute(self, plan: Plan, row: int) -> None:
        slot, start, count = (int(column[row]) for column in (plan.slot, plan.start, plan.count))
        assert start == len(self._rows[slot]), "a row is left out"
        for position in range(start, start + count):
            page = position // self._size
            unsent = set(self._now[slot, page])  # where the old layout puts it anyway
            if plan.armed[row]:
                unsent |= self._computes(plan, row, page)
            elif plan.attempt:
                self.late += 1
            self._rows[slot].append(unsent)

    def _computes(self, plan: Plan, row: int, page: int) -> set[int]:
        home = int(plan.home[row])
        if plan.layout in (Layout.TP, Layout.DOP):
            return set(range(self._num_ranks))
        if plan.layout is Layout.DP or plan.absorbed[row]:
            return {home}
        return {(home + page) % self._num_ranks}

    def to_send(self, slots: Sequence[int]) -> int:
        """Rows, counted once for each rank that lacks one under the placements to come, of requests in `slots`."""
        return sum(
            len(self._then[slot, i // self._size] - unsent)
            for slot in slots
            for i, unsent in enumerate(self._rows[slot])
        )
