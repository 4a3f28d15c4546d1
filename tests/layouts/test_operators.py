"""Ranks that run steps as GPUs do use what the registry chose, row for row, and all of them the same."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from splash_engines.choose import Used, choose_kernels
from splash_engines.kernels import Kernels
from splash_engines.kernels_reference import REFERENCE
from splash_engines.operations import Here
from splash_engines.operations_program import own, program_sizes, project_in
from splash_engines.registry import Candidate, Gather, Registry
from splash_engines.trtllm import Trtllm
from splash_trt.config import EngineConfig
from splash_trt.dist.world import World
from splash_trt.llm import LLM
from splash_trt.memory.arena import DTYPES
from splash_trt.models.config import ModelConfig
from splash_trt.request import SamplingParams
from tests.device_ranks import device_ranks
from tests.layouts.harness import LAYOUTS
from tests.switching.harness import write_model

PADDED = (2, 4, 8)
PROMPTS = [[(7 * n + 13 * i) % 40 for i in range(n)] for n in (1, 5, 33)]
WISH = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
HERE = Here(None, lambda: Trtllm(None, ()), lambda: "")
SECONDS = {"own": 2e-6, "wrong": 1e-9, "slow": 3e-6, "fast": 1e-6}


class Rank:
    """A rank's candidates for the latents' product, and what each of them was called with."""

    def __init__(self, rank: int, lacks: str | None) -> None:
        self.rank = rank
        self.rows: dict[str, list[int]] = {name: [] for name in SECONDS}
        self.told: list[Used] = []
        self._lacks = lacks
        self._last = ""

    def kernels(self, world: World, model: ModelConfig, config: EngineConfig) -> Kernels:
        mine = dataclasses.replace(REFERENCE, project_in=self._product("own", 1.0))
        few = self._candidate("fast", 1.0, lambda case: "up to 4 rows" if case["tokens"] > 4 else None)
        others = (self._candidate("wrong", 1.01), self._candidate("slow", 1.0), few)
        made = dataclasses.replace(project_in(HERE, mine), candidates=(own(mine.project_in), *others))
        registry = Registry([made], world.device, self._seconds, gather_of(world))
        sizes = {"project_in": program_sizes(model)["project_in"]}
        kernels, self.told = choose_kernels(mine, registry, sizes, DTYPES[config.dtype], PADDED)
        for rows in self.rows.values():
            rows.clear()
        return kernels

    def _product(self, name: str, factor: float) -> Callable[..., torch.Tensor]:
        def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            self._last = name
            self.rows[name].append(len(x))
            return F.linear(x, w) * factor

        return call

    def _candidate(self, name: str, factor: float, unfit: Callable[[Any], str | None] | None = None) -> Candidate:
        found = "not here" if name == self._lacks and self.rank == 1 else self._product(name, factor)
        return Candidate(name=name, load=lambda: found, unfit=unfit or (lambda case: None))

    def _seconds(self, call: Callable[[], Any]) -> float:
        call()
        return SECONDS[self._last] * (1 + self.rank)


def gather_of(world: World) -> Gather:
    """Over ranks that are threads."""

    def gather(told: dict[str, Any]) -> Sequence[dict[str, Any]]:
        data = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
        ones = [1] * world.size
        sizes = world.collectives.all_gather(torch.tensor([len(data)]), ones).tolist()
        return [json.loads(bytes(part.tolist())) for part in world.collectives.all_gather(data, sizes).split(sizes)]

    return gather


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def tokens_of(folder: Path, layout: str, lacks: str | None = None, ranks: int = 2) -> tuple[Any, list[Rank]]:
    made: list[Rank] = []

    def make(world: World, model: ModelConfig, config: EngineConfig) -> Kernels:
        made.append(Rank(world.rank, lacks))
        return made[-1].kernels(world, model, config)

    with device_ranks(PADDED, make_kernels=make):
        with LLM(folder, ranks=ranks, layout=layout, dummy_weights=1, dtype="float64", page_tokens=8) as llm:
            tokens = [completion.tokens for completion in llm.generate(PROMPTS, WISH)]
    return tokens, sorted(made, key=lambda rank: rank.rank)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[Any]:
    with device_ranks(PADDED), LLM(folder, ranks=2, dummy_weights=1, dtype="float64", page_tokens=8) as llm:
        yield [completion.tokens for completion in llm.generate(PROMPTS, WISH)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_use_what_is_right_and_fastest_at_their_rows(folder: Path, expected: Any, layout: str) -> None:
    tokens, ranks = tokens_of(folder, layout)
    assert tokens == expected
    for rank in ranks:
        assert set(rank.rows["fast"]) and set(rank.rows["fast"]) <= {2, 4}
        assert set(rank.rows["own"]) and not set(rank.rows["own"]) & {2, 4}
        assert not rank.rows["wrong"] and not rank.rows["slow"]
    # Each is as slow as on the slower rank, which is the second.
    few, many = ranks[0].told
    wrong = "wrong is wrong: relative error 1.0e-02, more than 5e-03"
    assert few == Used("project_in", "2-4", "fast", "2.0", f"own took 4.0 µs; {wrong}; slow took 6.0 µs")
    assert many == Used("project_in", "8", "own", "4.0", f"{wrong}; slow took 6.0 µs; fast is unfit: up to 4 rows")
    assert ranks[1].told == ranks[0].told


def test_what_one_rank_lacks_none_uses(folder: Path, expected: Any) -> None:
    tokens, ranks = tokens_of(folder, "tp", lacks="fast")
    assert tokens == expected
    for rank in ranks:
        assert rank.rows["own"] and not rank.rows["fast"]
        assert rank.told == ranks[0].told and "fast is absent: rank 1: not here" in rank.told[0].why
