"""Simulated routing is one more choice that the layout must not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from splash_trt.llm import LLM
from splash_trt.request import SamplingParams

TINY = Path(__file__).resolve().parents[2] / "perf" / "configs" / "tiny"
PROMPTS = [[(7 * n + 13 * i) % 256 for i in range(n)] for n in (1, 5, 33)]
WISH = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def continuations(layout: str, ranks: int, **config: Any) -> list[tuple[int, ...]]:
    with LLM(TINY, ranks=ranks, layout=layout, dummy_weights=1, dtype="float64", page_tokens=8, **config) as llm:
        return [completion.tokens for completion in llm.generate(PROMPTS, WISH)]


def test_all_layouts_simulate_the_same_routing() -> None:
    torch.set_num_threads(1)
    alone = continuations("tp", 1, simulate_routing="uniform")
    for layout in ("tp", "dp", "cp", "dop"):
        assert continuations(layout, 2, simulate_routing="uniform") == alone, layout
    assert continuations("tp", 1) != alone
