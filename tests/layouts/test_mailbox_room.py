"""What ranks on GPUs give each other to read between two meetings has room in half a mailbox, however small a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch

from splash_trt.config import EngineConfig, Layout
from splash_trt.models.families import load_config
from splash_trt.request import SamplingParams
from splash_trt.runtime.mailbox import ALIGNMENT, half_bytes
from splash_trt.runtime.peers import CollectivePeers
from splash_trt.runtime.shapes import Shapes, ladder
from tests.device_ranks import device_ranks
from tests.switching.harness import Server, make_requests, write_model

MEETINGS = ("sum_rows", "gather_rows", "pick_rows", "to_owners", "to_heads", "merge_parts", "context_rows")
MOST: dict[str, int] = {}


class Counted(CollectivePeers):
    """Counts the bytes of a half: MOST["used"] is the most there were."""

    def begin(self) -> None:
        self._used = 0

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        out = super().buffer(shape, dtype)
        self._used += -(-out.nbytes // ALIGNMENT) * ALIGNMENT
        MOST["used"] = max(MOST["used"], self._used)
        return out

    def gather_small(self, x: torch.Tensor) -> torch.Tensor:
        self.buffer(x.shape, x.dtype)
        out = super().gather_small(x)
        self._used = 0
        return out


def meeting(name: str) -> Callable[..., Any]:
    operation = getattr(CollectivePeers, name)

    def meet(self: Counted, *arguments: Any) -> Any:
        out = operation(self, *arguments)
        self._used = 0
        return out

    return meet


for _name in MEETINGS:
    setattr(Counted, _name, meeting(_name))


@pytest.mark.parametrize("hidden", [8, 256])
@pytest.mark.parametrize(("tokens", "running"), [(12, 12), (300, 12)])
@pytest.mark.parametrize("layout", Layout)
def test_a_half_holds_it(tmp_path: Path, layout: Layout, tokens: int, running: int, hidden: int) -> None:
    folder, ranks = write_model(tmp_path, hidden_size=hidden, num_attention_heads=1), 2
    wish = SamplingParams(max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
    requests = [msgspec.structs.replace(request, sampling=wish) for request in make_requests(min(running, 4) + 2)]
    config = {"max_batch_tokens": tokens, "max_running": running, "context_block_tokens": 512, "dtype": "float32"}
    MOST["used"] = 0
    with device_ranks(ladder(1, running, 4)), patch("splash_trt.runtime.cpu_runner.CollectivePeers", Counted):
        with Server(folder, ranks=ranks, layout=layout, pages=60, layouts=(), **config) as server:
            server.add(*requests)
            server.run()
            chunk = server.llm.config.most_absorbed(layout)
    # As gpu_runner.py reckons.
    absorbed = max(ranks * running, min(tokens, running * chunk))
    assert 0 < MOST["used"] <= half_bytes(load_config(folder), 4, max(tokens, ranks * running), absorbed)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize(("tokens", "running"), [(1, 1), (8, 2), (4096, 600), (16384, 16)])
def test_a_half_holds_a_few_numbers_for_each_wanted_position(
    tmp_path: Path, ranks: int, tokens: int, running: int
) -> None:
    """Even of the least model: of all shapes that graphs are captured for."""
    model = load_config(write_model(tmp_path, hidden_size=8, num_attention_heads=1))
    config = EngineConfig(
        num_ranks=ranks, layout=Layout.TP, memory_bytes=1, max_batch_tokens=tokens, max_running=running
    )
    half = half_bytes(model, 2, max(tokens, ranks * running), ranks * running)
    for layout in Layout:
        for shape in Shapes(config, ladder(1, running, 4)).before(layout):
            assert 16 * shape.wanted <= half, shape
