"""The collectives over MPI on CPU tensors, sent from and received into the tensors' own memory.

MPI only moves elements here, as integers of the same width, and never adds them: see exchange.py. Calls block without a
deadline; it is the watchdog that ends a rank which waits for too long.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from mpi4py import MPI

from splash_trt.dist.board import Watch
from splash_trt.dist.exchange import ExchangeCollectives

# By bytes per element: for a move, only the width matters.
_TYPES = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T}
# MPI's counts are C ints.
MAX_ELEMENTS = 2**31 - 1


class MpiCollectives(ExchangeCollectives):
    """A `Collectives` on a duplicate of `comm`; the constructor and `close` are collective."""

    def __init__(self, comm: MPI.Intracomm, watch: Watch) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), watch)
        self._comm = comm.Dup()

    def close(self) -> bool:
        """Frees the communicator. True, as NcclCollectives.close returns if it succeeded."""
        self._comm.Free()
        return True

    def _exchange(self, send: Sequence[torch.Tensor], recv: Sequence[torch.Tensor]) -> None:
        requests = []
        for distance in range(1, self.size):
            source = (self.rank - distance) % self.size
            if recv[source].numel():
                _check_size(recv[source].numel())
                requests.append(self._comm.Irecv(_buffer(recv[source]), source))
        for distance in range(1, self.size):
            target = (self.rank + distance) % self.size
            if send[target].numel():
                _check_size(send[target].numel())
                requests.append(self._comm.Isend(_buffer(send[target]), target))
        MPI.Request.Waitall(requests)


def _buffer(x: torch.Tensor) -> tuple[np.ndarray, int, MPI.Datatype]:
    """x's memory as mpi4py takes it; viewed as bytes, since numpy has no bf16."""
    assert x.device.type == "cpu" and x.is_contiguous(), (x.device, x.stride())
    return x.reshape(-1).view(torch.uint8).numpy(), x.numel(), _TYPES[x.element_size()]


def _check_size(num_elements: int) -> None:
    if num_elements > MAX_ELEMENTS:
        raise ValueError(
            f"{num_elements} elements in one exchange between ranks: MPI takes at most {MAX_ELEMENTS}; "
            "lower max_batch_tokens"
        )
