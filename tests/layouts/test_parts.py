"""What attention's programs take each, as a step's program gives it to the kernel, which plain ones do not look at.

In all layouts and across switches, the parts are of the very lengths that come with them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from splash_engines.kernels import Kernels
from splash_engines.kernels_reference import REFERENCE
from splash_plugins.mla_attention import cut
from splash_plugins.mla_attention.cut import Parts
from splash_trt.config import EngineConfig
from splash_trt.dist.world import World
from splash_trt.models.config import ModelConfig
from tests.device_ranks import device_ranks
from tests.switching.harness import TOUR, Server, assert_same, make_requests, never_switched, write_model
from tests.unit import test_cut

Checks = dict[int, set[tuple[bool, tuple[tuple[int, ...], ...]]]]
"""By A: whether something was cut, and the sizes of the parts' arrays."""


def checking(function: Callable[..., None], seen: Checks) -> Callable[..., None]:
    def call(
        q: torch.Tensor, pages: Any, tables: Any, slot: Any, first: Any, length: torch.Tensor, parts: Parts, *rest: Any
    ) -> None:
        assert len(q) == len(length)
        found = parts.part.numpy(), parts.read_part.numpy(), parts.merged.numpy()
        test_cut.check(length.numpy(), found)
        for array, want in zip(found, cut.cut(length.numpy(), q.shape[1]), strict=True):
            assert (array == want).all(), "they are cut for as many heads as attend"
        seen[len(q)].add((bool((found[1][:, 1] > 1).any()), tuple(array.shape for array in found)))
        function(q, pages, tables, slot, first, length, parts, *rest)

    return call


@pytest.mark.parametrize(("ranks", "heads", "sizes"), [(2, 5, (4, 16)), (4, 3, (6,)), (3, 5, ())])
def test_parts_are_of_the_lengths_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, heads: int, sizes: tuple[int, ...]
) -> None:
    """Contexts are short, so tiles are made so, too; and of 3 heads one rank of 4 has none."""
    seen: Checks = defaultdict(set)
    for module in (cut, test_cut):
        monkeypatch.setattr(module, "TILE_ROWS", 8)
    monkeypatch.setattr(cut, "BLOCK_HEADS", 1)  # so that how many heads there are makes a difference
    checked = {name: checking(getattr(REFERENCE, name), seen) for name in ("decode", "decode_values")}

    def kernels(world: World, model: ModelConfig, config: EngineConfig) -> Kernels:
        return replace(REFERENCE, **checked)

    folder, requests = write_model(tmp_path, num_attention_heads=heads), make_requests(8, max_tokens=40)
    options: dict[str, Any] = {"max_running": 6, "absorbed_tokens": 3, "dop_absorbed_tokens": 3}
    with device_ranks(sizes, None, kernels), Server(
        folder, ranks=ranks, layout=TOUR[0], pages=60, migration_bytes=20000, **options
    ) as server:  # fmt: skip
        server.add(*requests)
        for target in TOUR[1:]:
            assert server.switch(target).outcome == "committed"
        server.run()
    assert_same(server.told, never_switched(folder, requests))
    assert all(len({shapes for _, shapes in found}) == 1 for found in seen.values())
    assert any(was_cut for found in seen.values() for was_cut, _ in found)
