"""The sampler of steps without filters chooses what the full one does, on every rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from splash_trt.dist.world import ThreadWorld, World
from splash_trt.plan import SAMPLE
from splash_trt.runtime.fast_sampler import FastSampler
from splash_trt.runtime.peers import CollectivePeers
from splash_trt.runtime.sampler import RowParams, Sampler
from tests.unit.test_sampler import cut, mixed_rows

torch.set_num_threads(1)


@pytest.mark.parametrize("size, empty", [(1, False), (2, False), (3, True), (8, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_rows", [0, 1, 700])
def test_tokens_are_the_full_samplers(num_rows: int, dtype: torch.dtype, size: int, empty: bool) -> None:
    vocab_size = 203
    x, rows = mixed_rows(num_rows, vocab_size, dtype)
    rows["top_k"], rows["top_p"], rows["min_p"] = 0, 1.0, 0.0
    x[1:9] = np.array([np.nan, np.inf, -np.inf, 0.0] * 2)[: len(x[1:9]), None]
    x[20:30, ::3] = np.nan
    x[30:40, ::3] = np.inf
    whole, position, widths = torch.from_numpy(x).to(dtype), np.arange(num_rows) + 5, cut(vocab_size, size, empty)

    def program(world: World) -> tuple[torch.Tensor, torch.Tensor]:
        first = sum(widths[: world.rank])
        shard = whole[:, first : first + widths[world.rank]]
        params = RowParams.build(rows, position, np.full(num_rows, SAMPLE))
        full = Sampler(world.collectives, first, vocab_size)(shard, params)
        columns = (torch.from_numpy(rows[name].copy()) for name in ("temperature", "seed"))
        fast = FastSampler(CollectivePeers(world.collectives), first, vocab_size)
        return full.tokens, fast(shard, *columns, torch.from_numpy(position))

    results = ThreadWorld(size).run(program)
    for full, fast in results:
        assert fast.dtype == torch.int64 and fast.tolist() == full.tolist() == results[0][0].tolist()
