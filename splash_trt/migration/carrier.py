"""A GPU's `Carrier` (peer_mover.py): copies between its memory and that of other GPUs mapped into it. Large pieces are
copied by the copy engines, small ones by a kernel; on a side stream, or on the step's stream."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from splash_trt.memory.device_memory import copy
from splash_trt.migration.pieces import split

ENGINE_BYTES = 128 << 10
"""The smallest piece for a copy engine, if the kernel can copy it too: below, the launch takes longer than the copy."""
MOST_ORDERS = 256
"""The most pieces for the copy engines in one call."""
PROGRAMS = 512
"""Programs of the kernel on the step's stream, where the step waits for it."""
PROGRAMS_BESIDE = 16
"""Programs on the side stream, where the step needs the multiprocessors: 16 of them reach a third of NVLink's rate."""

PieceCopy = Callable[[torch.Tensor, int, int], None]
"""The kernel of plugins/piece_copy: pieces, the unit in bytes that divides all of their numbers, programs."""


class CudaCarrier:
    """The step's stream is the current one. unit: bytes that divide every address and length of rows (Places.unit).

    The side stream has the lowest priority, which the current stream has too unless it was created with another.
    """

    def __init__(self, device: torch.device, unit: int, piece_copy: PieceCopy) -> None:
        self._device = device
        self._unit = unit
        self._piece_copy = piece_copy
        self._side_stream = torch.cuda.Stream(device)
        self._used: list[torch.Tensor] = []
        self._joined = True
        self.now(np.zeros((1, 3), np.int64))  # compiles the kernel: later, other ranks would wait for it

    def now(self, pieces: np.ndarray) -> None:
        large, small = split(pieces, ENGINE_BYTES, MOST_ORDERS, self._unit)
        self._engines(large, torch.cuda.current_stream(self._device))
        if len(small):
            self._piece_copy(self._table(small), self._unit, PROGRAMS)

    def beside(self, pieces: np.ndarray) -> None:
        large, small = split(pieces, ENGINE_BYTES, MOST_ORDERS, self._unit)
        if len(small):
            # Kept until `join`: the step's stream owns this memory and could reuse it as soon as nobody refers to it.
            self._used.append(self._table(small))
        self._side_stream.wait_stream(torch.cuda.current_stream(self._device))
        self._joined = False
        self._engines(large, self._side_stream)
        if len(small):
            with torch.cuda.stream(self._side_stream):
                self._piece_copy(self._used[-1], self._unit, PROGRAMS_BESIDE)

    def join(self) -> None:
        if not self._joined:
            torch.cuda.current_stream(self._device).wait_stream(self._side_stream)
            self._joined = True
        self._used.clear()

    def _engines(self, pieces: np.ndarray, stream: torch.cuda.Stream) -> None:
        for source, target, num_bytes in pieces.tolist():
            copy(target, source, num_bytes, stream)

    def _table(self, pieces: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(pieces)).pin_memory()
        return host.to(self._device, non_blocking=True)
