"""A sample of the exactness cases on real MPI ranks: the same program as between threads, other collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from splash_trt.config import EngineConfig, Layout
from splash_trt.dist.world import World
from splash_trt.models.families import load_config
from splash_trt.orchestrator import Orchestrator
from splash_trt.request import Request, SamplingParams
from splash_trt.weights.checkpoint import Checkpoint
from splash_trt.worker import start_worker
from tests.mpi.world import Ranks
from tests.oracles.tiny_models import make_model
from tests.oracles.transformers_float64 import Oracle

pytestmark = pytest.mark.mpi

SAMPLE = [("v3_base", "tp"), ("v3_mtp", "cp"), ("glm_mixed", "dop"), ("v2_grouped", "dp"), ("v3_half_rope", "cp")]
PROMPT_LENGTHS = (1, 7, 8, 9, 30)  # of pages of 8
NEW_TOKENS = 6


def generate(world: World, folder: str, layout: str, prompts: list[list[int]], sampled: bool) -> list[list[Any]]:
    """[tokens, log-probabilities of every token after the first] of each prompt, on rank 0; nothing elsewhere."""
    model = load_config(Path(folder))
    config = EngineConfig(
        num_ranks=world.size,
        layout=Layout.parse(layout),
        dtype="float64",
        memory_bytes=8 << 20,
        page_tokens=8,
        max_batch_tokens=24,
        max_running=8,
        context_block_tokens=16,
    )
    worker = start_worker(world, model, config, Checkpoint(Path(folder), model))
    if world.rank != 0:
        worker.follow()
        return []
    orchestrator = Orchestrator.of(model, config, worker)
    out: list[list[Any]] = [[[], []] for _ in prompts]
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(
            max_tokens=NEW_TOKENS,
            temperature=0.9 if sampled else 0,
            seed=index,
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=0,
        )
        orchestrator.add(Request(id=str(index), prompt=tuple(prompt), sampling=sampling))
    while not orchestrator.idle:
        for delta in orchestrator.step():
            tokens, logprobs = out[int(delta.request_id)]
            tokens += delta.tokens
            logprobs += [entry.logprob for entry in delta.prompt_logprobs + delta.logprobs]
    orchestrator.scheduler.check_idle()
    world.control.send_object("done")
    return out


def prompts_of(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 250, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


@pytest.mark.parametrize(("variant", "layout"), SAMPLE)
@pytest.mark.parametrize("size", [2, 4])
def test_log_probabilities_are_the_oracles(
    mpi2: Ranks, mpi4: Ranks, tmp_path: Path, size: int, variant: str, layout: str
) -> None:
    folder = make_model(variant, tmp_path / variant)
    oracle, prompts = Oracle(folder), prompts_of(size)
    answers = {2: mpi2, 4: mpi4}[size].run(generate, str(folder), layout, prompts, False)[0]
    for prompt, (tokens, logprobs) in zip(prompts, answers, strict=True):
        ids = prompt + tokens
        rows = oracle.logprobs(ids)[:-1]
        expected = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert len(tokens) == NEW_TOKENS and len(logprobs) == len(ids) - 1
        assert (torch.tensor(logprobs, dtype=torch.float64) - expected).abs().max() < 1e-8
        assert rows[len(prompt) - 1 :].argmax(dim=1).tolist() == tokens


def test_layouts_sample_the_same_tokens(mpi2: Ranks, mpi4: Ranks, tmp_path: Path) -> None:
    folder, prompts = make_model("v3_base", tmp_path / "model"), prompts_of(9)
    answers = [
        [tokens for tokens, _ in ranks.run(generate, str(folder), layout, prompts, True)[0]]
        for ranks in (mpi2, mpi4)
        for layout in ("tp", "dp", "cp", "dop")
    ]
    assert all(answer == answers[0] for answer in answers)
    assert len({tuple(tokens) for tokens in answers[0]}) == len(prompts)
