"""Rules for a step that matter on GPUs, and that a CPU would not notice to be broken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
import torch

from splash_trt.config import Layout
from splash_trt.llm import LLM
from splash_trt.request import SamplingParams
from splash_trt.runtime.peers import CollectivePeers
from tests.device_ranks import device_ranks
from tests.switching.harness import Server, make_requests, write_model

PROMPTS = [[(7 * n + 13 * i) % 40 for i in range(n)] for n in (1, 5, 33)]
WISH = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


class OneCapture:
    """A second stream under a capture: it is part of it from `run` to `join`, and cannot be joined else."""

    def __init__(self, device: torch.device) -> None:
        self._running = False

    @contextmanager
    def run(self, urgent: bool = False) -> Iterator[None]:
        assert not self._running, "work beside the step was not joined"
        self._running = True
        yield

    def join(self) -> None:
        assert self._running, "nothing was run beside the step"
        self._running = False


@pytest.mark.parametrize("shared", [0, 1])
def test_only_work_beside_the_step_is_joined(tmp_path: Path, shared: int) -> None:
    folder = write_model(tmp_path, n_shared_experts=shared)
    expected = continuations(folder)
    with device_ranks((2, 4)), patch("splash_trt.runtime.program.SideStream", OneCapture):
        assert continuations(folder) == expected


def continuations(folder: Path) -> list[tuple[int, ...]]:
    with LLM(folder, ranks=2, layout="dp", dummy_weights=1, dtype="float64", page_tokens=8) as llm:
        return [completion.tokens for completion in llm.generate(PROMPTS, WISH)]


class Told(CollectivePeers):
    """Writes down what rank 0 comes to. On the host, of a replayed graph nothing but what follows it shows."""

    def begin(self) -> None:
        self._tell("begin")

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self._tell("program")
        return super().buffer(shape, dtype)

    def gather_small(self, x: torch.Tensor) -> torch.Tensor:
        self._tell("status" if x.shape[1] > 2 else "program")
        return super().gather_small(x)

    def _tell(self, name: str) -> None:
        if self.rank == 0:
            LOG.append(name)


LOG: list[str] = []


def test_no_layout_runs_on_heads_that_never_came(tmp_path: Path) -> None:
    """Where they would be lie cache rows."""
    with Server(write_model(tmp_path), ranks=2, layout=Layout.TP, pages=40) as server:
        server.add(*make_requests(2))
        server.step()
        plan = msgspec.structs.replace(server.plans[-1], layout=Layout.DP)
        with pytest.raises(AssertionError, match="DP without weights"):
            server.runner(0).launch(plan)


def test_ranks_meet_anew_before_they_tell_their_status(tmp_path: Path) -> None:
    LOG.clear()
    with device_ranks((2, 4)), patch("splash_trt.runtime.cpu_runner.CollectivePeers", Told):
        with Server(write_model(tmp_path), ranks=2, layout=Layout.TP, pages=40) as server:
            server.add(*make_requests(6))
            server.step()
            assert server.switch(Layout.DP).outcome == "committed"
            server.run()
    before = [LOG[i - 1] for i, name in enumerate(LOG) if name == "status"]
    assert before and set(before) == {"begin"}
