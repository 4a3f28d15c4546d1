"""The collectives over MPI for GPU tensors, which go through the host's memory: for ranks that share a GPU.

NCCL refuses two ranks on one GPU. These are slow, but only loading and fallbacks use them: in the steps of ranks on one
host, data is exchanged inside kernels (runtime/peers_cuda.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from splash_trt.dist.board import Watch
from splash_trt.dist.collectives_mpi import MpiCollectives


class StagedCollectives(MpiCollectives):
    """Calls block until the exchange is done, after what is on the current stream. `device` becomes this rank's current
    one."""

    def __init__(self, comm: MPI.Intracomm, watch: Watch, device: torch.device) -> None:
        super().__init__(comm, watch)
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def _exchange(self, send: Sequence[torch.Tensor], recv: Sequence[torch.Tensor]) -> None:
        staged = [torch.empty_like(x, device="cpu") for x in recv]
        # Several entries of `send` may be one tensor, which is copied once.
        copies = {key: x.cpu() for key, x in {id(x): x for x in send}.items()}
        super()._exchange([copies[id(x)] for x in send], staged)
        for rank, (x, landed) in enumerate(zip(recv, staged, strict=True)):
            if rank != self.rank:
                x.copy_(landed)
