"""The kernels that sample over vocabulary shards, for 77,440 ids of a rank and two ranks."""

from __future__ import annotations

import triton

from splash_plugins.shard_sample import kernel
from tests.kernels.aot import Kernel, Target, overlaps

NUM_IDS = 77_440
ROWS = {
    "stride": "i32",
    "seed": "*i64",
    "position": "*i64",
    "first_id": "i32",
    "num_ids": "i32",
    "best": "*fp32",
    "column": "*i32",
    "num_blocks": "i32",
}


def kernels(target: Target) -> list[Kernel]:
    blocks = triton.next_power_of_2(triton.cdiv(NUM_IDS, kernel.BLOCK))
    listed = []
    overlap = {"OVERLAP": overlaps(target)}
    for logits, temperature in (("*fp32", "*fp64"), ("*bf16", "*fp32"), ("*fp16", "*fp64")):
        rows = {**ROWS, "logits": logits, "temperature": temperature}
        found = {"score": "*fp64", "score_stride": "i32", "id": "*i64", "id_stride": "i32"}
        listed += [
            Kernel(kernel._best_of_blocks, rows, {"BLOCK": kernel.BLOCK, **overlap}, aligned=("stride", "num_ids")),
            Kernel(
                kernel._best_of_rows,
                {**rows, **found},
                {"BLOCK": kernel.BLOCK, "BLOCKS": blocks, **overlap},
                aligned=("stride", "num_ids"),
            ),
        ]
    winners = {"found": "*fp64", "tokens": "*i64", "num_rows": "i32"}
    return [*listed, Kernel(kernel._best_of_shards, winners, {"N": 2, "ROWS": kernel.WINNERS_BLOCK, **overlap})]
