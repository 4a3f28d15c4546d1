"""The inputs of perf/kernels_experts.py: experts and tokens that are routed to them; and how results are checked and
timed.

T tokens, k choices a token, E_r experts on this rank, D hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from perf.gpu_measure import captured, median_us
from splash_plugins.grouped_experts import reference
from splash_trt.models.config import Experts, GroupScore, Scoring

GPU = torch.device("cuda")
# The relative error ‖out − reference‖ / ‖reference‖ that rounding can explain.
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}


@dataclass(frozen=True)
class Shape:
    """One layer's experts on one of two ranks. local: how many of them the rank has."""

    name: str
    hidden: int
    inner: int
    rules: Experts
    local: int

    @property
    def top_k(self) -> int:
        return self.rules.top_k


def rules(top_k: int, num_groups: int, top_groups: int) -> Experts:
    return Experts(
        num_experts=64,
        top_k=top_k,
        intermediate_size=0,
        shared_intermediate_size=0,
        scoring=Scoring.SIGMOID,
        selection_bias=True,
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=GroupScore.TOP2_SUM,
        normalize=True,
        scale=1.8,
    )


GLM = Shape("glm-4.7-flash", 2048, 1536, rules(4, 1, 1), 32)
GLM_INSIDE = Shape("glm-4.7-flash cut inside", 2048, 768, rules(4, 1, 1), 64)
SLICE = Shape("deepseek-v3-slice", 7168, 2048, rules(8, 8, 4), 32)
TINY = Shape("tiny", 256, 192, rules(4, 1, 1), 8)


@dataclass
class Case:
    """A layer's weights, and several sets of tokens with random choices."""

    shape: Shape
    tokens: int
    gate_up: torch.Tensor
    down: torch.Tensor
    sets: int
    first: int = 0
    x: list[torch.Tensor] = field(default_factory=list)
    choice: list[torch.Tensor] = field(default_factory=list)
    weight: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        dtype = self.down.dtype
        for _ in range(self.sets):
            self.x.append(torch.randn(self.tokens, self.shape.hidden, device=GPU, dtype=dtype))
            order = torch.rand(self.tokens, self.shape.rules.num_experts, device=GPU).argsort(1)
            self.choice.append(order[:, : self.shape.top_k].to(torch.int32).contiguous())
            self.weight.append(torch.rand(self.tokens, self.shape.top_k, device=GPU))
        self.addend = torch.randn(self.tokens, self.shape.hidden, device=GPU, dtype=dtype)
        self.out = torch.empty_like(self.addend)

    def arguments(self, i: int) -> tuple[Any, ...]:
        where = (self.gate_up, self.down, self.first, self.addend, self.out)
        return self.x[i], self.choice[i], self.weight[i], *where

    def wanted(self) -> torch.Tensor:
        out = torch.empty_like(self.out)
        reference.sum_of_experts(*self.arguments(0)[:-1], out)
        return out

    def hit(self) -> float:
        """How many of the rank's experts a set's tokens use, on average over sets."""
        return sum(int(torch.unique(c[c < self.shape.local]).numel()) for c in self.choice) / self.sets

    def pairs(self) -> float:
        """How many pairs have an expert of the rank, on average over sets."""
        return sum(int((c < self.shape.local).sum()) for c in self.choice) / self.sets


def weights(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = torch.randn(shape.local, 2 * shape.inner, shape.hidden, device=GPU, dtype=dtype)
    down = torch.randn(shape.local, shape.hidden, shape.inner, device=GPU, dtype=dtype)
    return gate_up.div_(shape.hidden**0.5), down.div_(shape.inner**0.5)


class Checks:
    def __init__(self) -> None:
        self.failed = 0

    def see(self, what: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
        error = float((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-30))
        if not error <= tolerance:
            self.failed += 1
            print(f"WRONG {what}: relative error {error:.2e}, tolerance {tolerance:.0e}", flush=True)

    def experts(self, what: str, case: Case, run: Callable[..., None], want: torch.Tensor) -> None:
        case.out.fill_(torch.nan)
        run(*case.arguments(0))
        self.see(f"{case.shape.name} T {case.tokens} {what}", case.out, want, TOLERANCE[case.out.dtype])


def time_us(launches: Sequence[Callable[[], object]], seconds: float = 0.02) -> float:
    """The median microseconds of one launch. All are in one CUDA graph, which is replayed for about `seconds`."""
    launches[0]()
    graph = captured(launches)
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    graph.replay()
    ends[0].record()
    graph.replay()
    ends[1].record()
    torch.cuda.synchronize()
    replays = max(5, min(40, int(seconds * 1e3 / max(1e-3, ends[0].elapsed_time(ends[1])))))
    return median_us(graph, replays) / len(launches)
