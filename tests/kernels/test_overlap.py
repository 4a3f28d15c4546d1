"""How kernels are launched that may begin while the kernel before them is still running."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from splash_plugins import overlap_kernel
from splash_plugins.overlap_kernel import overlap

pytestmark = pytest.mark.kernels
ON_GPU = cast(Any, SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0)))


def test_one_after_a_join_begins_late_and_lets_the_next_begin_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert overlap(ON_GPU) == {"OVERLAP": True, "launch_pdl": True}
    assert overlap(ON_GPU, after_join=True) == {"OVERLAP": True}


@pytest.mark.parametrize("after_join", [False, True])
@pytest.mark.parametrize("without", ["capability", "HIP", "asking", "GPU"])
def test_where_none_overlaps(monkeypatch: pytest.MonkeyPatch, without: str, after_join: bool) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4" if without == "HIP" else None)
    capability = (8, 9) if without == "capability" else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(overlap_kernel, "BY_DEFAULT", without != "asking")
    tensor = torch.zeros(1) if without == "GPU" else ON_GPU
    assert overlap(tensor, after_join=after_join) == {"OVERLAP": False}
