"""What the layout tests share: models and their oracle, a run that watches itself, and the comparison of the two.

The oracle is transformers in float64 for probabilities (tests/oracles) and, for what is drawn from them, a sampler
written here over whole rows of the vocabulary, with plain Python integers for the noise.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import SPECS, Residency
from splash_trt.llm import LLM
from splash_trt.memory.map import Capacity, capacity, memory_map
from splash_trt.models.config import ModelConfig
from splash_trt.models.families import load_config
from splash_trt.plan import Plan
from splash_trt.request import Completion, FinishReason, SamplingParams, TokenLogprob
from tests.oracles.tiny_models import make_model
from tests.oracles.transformers_float64 import Oracle

LAYOUTS = ("tp", "dp", "cp", "dop")
MEMORY_BYTES = 8 << 20  # holds every test model and a few thousand tokens


class Models:
    """The test models by name: folders, oracles, and log-probabilities of ids already asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._oracles: dict[str, Oracle] = {}
        self._logprobs: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def folder(self, name: str) -> Path:
        path = self._root / name
        return path if path.exists() else make_model(name, path)

    def derive(self, name: str, base: str, **changes: Any) -> None:
        """A model called `name`: the weights of `base` and its config.json with `changes`."""
        path = self._root / name
        if not path.exists():
            shutil.copytree(self.folder(base), path)
            file = path / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    def config(self, name: str) -> ModelConfig:
        return load_config(self.folder(name))

    def oracle(self, name: str) -> Oracle:
        if name not in self._oracles:
            self._oracles[name] = Oracle(self.folder(name))
        return self._oracles[name]

    def logprobs(self, name: str, ids: Sequence[int]) -> torch.Tensor:
        """[len(ids), vocab] float64: of the token after each position."""
        key = (name, tuple(ids))
        if key not in self._logprobs:
            self._logprobs[key] = self.oracle(name).logprobs(ids)
        return self._logprobs[key]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One generate call: what came out, and the plans that made it."""

    completions: list[Completion]
    plans: list[Plan]
    capacity: Capacity

    @property
    def num_preempted(self) -> int:
        """Admissions beyond the first one of each request."""
        return sum(len(plan.sampling) for plan in self.plans) - len(self.completions)

    @property
    def num_mixed(self) -> int:
        """Steps with decodes and prefill chunks side by side."""
        return sum(bool(((p.start > 0) & (p.count == 1)).any() and (p.count > 1).any()) for p in self.plans)


def rank_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("rank")}


def serve(
    folder: Path,
    batches: Sequence[tuple[Sequence[Sequence[int]], Sequence[SamplingParams]]],
    *,
    ranks: int,
    layout: str,
    **config: Any,
) -> list[Result]:
    """One generate call for each of `batches` on the same ranks, which all end.

    After each call everything must have been given back, and no rank may outlive the run.
    """
    defaults: dict[str, Any] = {
        "dtype": "float64",
        "memory_bytes": MEMORY_BYTES,
        "max_batch_tokens": 1024,
        "max_running": 16,
    }
    before, results = rank_threads(), []
    with LLM(folder, ranks=ranks, layout=layout, **(defaults | config)) as llm:
        assert len(rank_threads() - before) == ranks - 1
        assert llm.orchestrator is not None
        scheduler = llm.orchestrator.scheduler
        for prompts, sampling in batches:
            plans: list[Plan] = []
            with patch.object(scheduler, "schedule", _recording(scheduler.schedule, plans)):
                completions = llm.generate(prompts, sampling)
            scheduler.check_idle()
            results.append(Result(completions=completions, plans=plans, capacity=llm.capacity))
    assert rank_threads() <= before, "a rank outlived its world"
    return results


def _recording(schedule: Callable[..., Plan | None], plans: list[Plan]) -> Callable[..., Plan | None]:
    def recorded(*arguments: Any) -> Plan | None:
        plan = schedule(*arguments)
        if plan is not None:
            plans.append(plan)
        return plan

    return recorded


def memory_for(model: ModelConfig, *, pages: int, request_tokens: int, ranks: int, layout: str, **config: Any) -> int:
    """The least memory_bytes that gives every rank `pages` pages, or more if a request needs them."""
    kind = Layout.parse(layout)

    def sized(num_bytes: int) -> EngineConfig:
        return EngineConfig(num_ranks=ranks, layout=kind, memory_bytes=num_bytes, **config)

    while True:
        most = 0
        for rank in range(ranks):
            sizes = memory_map(model, sized(1), rank)
            others = sizes.others_bytes + 255 if SPECS[kind].residency is Residency.FULL else 0
            most = max(most, sizes.pages_offset + pages * sizes.page_bytes + others)
        if capacity(model, sized(most), kind).request_tokens >= request_tokens:
            return most
        pages += 1


def random_prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    """Ids that every test model's vocabulary has."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 250, (n,), generator=generator).tolist() for n in lengths]


def greedy(max_tokens: int, *, prompt_logprobs: int | None = 0, logprobs: int = 0) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=0, ignore_eos=True, logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )


# The comparison


def entries(completion: Completion) -> list[tuple[int, TokenLogprob]]:
    """(position of the row that predicts it, what was reported) of every reported token, in order."""
    prompt = completion.prompt
    assert len(completion.logprobs) == len(completion.tokens) > 0
    assert len(completion.prompt_logprobs) in (0, len(prompt) - 1)
    return [*enumerate(completion.prompt_logprobs), *enumerate(completion.logprobs, start=len(prompt) - 1)]


def differences(models: Models, name: str, completion: Completion) -> torch.Tensor:
    """|log-probability - the oracle's| of every reported token, alternatives included; NaN counts as infinite.

    [positions reported] float64: the worst one of each position.
    """
    ids = [*completion.prompt, *completion.tokens]
    reference = models.logprobs(name, ids)
    worst = []
    for position, entry in entries(completion):
        assert entry.token == ids[position + 1]
        row = reference[position]
        told = [(entry.logprob, float(row[entry.token]))]
        best = row.topk(len(entry.top)).values.tolist()
        told += [(logprob, float(row[token])) for token, logprob in entry.top]
        told += [(logprob, value) for (_, logprob), value in zip(entry.top, best, strict=True)]
        worst.append(max(abs(got - want) if got == got else math.inf for got, want in told))
    return torch.tensor(worst, dtype=torch.float64)


def worst_difference(models: Models, name: str, completions: Sequence[Completion]) -> float:
    return max(float(differences(models, name, completion).max()) for completion in completions)


def check_tokens(models: Models, name: str, completion: Completion, params: SamplingParams) -> None:
    """Every generated token is what the reference sampler takes from the oracle's distribution."""
    ids = [*completion.prompt, *completion.tokens]
    rows = models.logprobs(name, ids)[len(completion.prompt) - 1 : -1]
    want = [draw(row, params, position) for position, row in enumerate(rows, start=len(completion.prompt))]
    assert list(completion.tokens) == want
    assert completion.finish is FinishReason.LENGTH and completion.error is None
    assert len(completion.tokens) == params.max_tokens


def draw(logprobs: torch.Tensor, params: SamplingParams, position: int) -> int:
    """The token at `position` from logprobs [vocab]: Gumbel noise over what the filters leave, or the largest."""
    if params.temperature == 0:
        return int(logprobs.argmax())
    assert params.seed is not None
    tempered = torch.log_softmax(logprobs / params.temperature, dim=-1)
    keep = tempered >= tempered.max() + (math.log(params.min_p) if params.min_p else -math.inf)
    if params.top_k:
        keep &= tempered >= tempered.topk(min(params.top_k, len(tempered))).values[-1]
    if params.top_p < 1:
        mass, order = torch.where(keep, tempered.exp(), 0.0).sort(descending=True)
        before = mass.cumsum(0) - mass
        keep[order[before >= params.top_p * mass.sum()]] = False
    noise = torch.tensor([gumbel(params.seed, position, i) for i in range(len(tempered))], dtype=torch.float64)
    return int((tempered + noise).masked_fill(~keep, -math.inf).argmax())


_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """splitmix64's finaliser (Steele, Lea, Flood, OOPSLA 2014)."""
    x &= _WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _WORD
    return x ^ (x >> 31)


def gumbel(seed: int, position: int, token: int) -> float:
    """The noise of one token id, from (seed, position, id) alone."""
    key = _mix(_mix(seed + _GAMMA) + (position + 1) * _GAMMA)
    cell = _mix(key + (token + 1) * _GAMMA) >> 12
    return -math.log(-math.log((cell + 0.5) * 2.0**-52))
