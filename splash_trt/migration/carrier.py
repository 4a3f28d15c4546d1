"""Copies between a GPU's memory and that of the peers mapped into it: large pieces by the copy engines, small ones by a
kernel, beside the step on a stream of their own or in its order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from splash_trt.memory.device_memory import copy
from splash_trt.migration.pieces import split

ENGINE_BYTES = 128 << 10
"""The least that an engine is asked for, if the kernel can copy it too: below, the order takes longer than the copy."""
MOST_ORDERS = 256
"""To engines, in one call."""
PROGRAMS = 512
"""Of the kernel in the step's order, for which the step waits."""
PROGRAMS_BESIDE = 16
"""Beside it, where the step needs the multiprocessors: 16 programs keep up with a third of NVLink."""

PieceCopy = Callable[[torch.Tensor, int, int], None]
"""plugins/piece_copy: pieces, the bytes that divide their numbers, programs."""


class CudaCarrier:
    """A `Carrier`; the step is the current stream. unit: bytes that divide all of rows (Places.unit).

    The other stream has the lowest priority there is, which is that of a step's too unless its stream has another.
    """

    def __init__(self, device: torch.device, unit: int, piece_copy: PieceCopy) -> None:
        self._device = device
        self._unit = unit
        self._piece_copy = piece_copy
        self._beside = torch.cuda.Stream(device)
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
            # The step's stream owns this memory, and could use it again as soon as nobody here holds it.
            self._used.append(self._table(small))
        self._beside.wait_stream(torch.cuda.current_stream(self._device))
        self._joined = False
        self._engines(large, self._beside)
        if len(small):
            with torch.cuda.stream(self._beside):
                self._piece_copy(self._used[-1], self._unit, PROGRAMS_BESIDE)

    def join(self) -> None:
        if not self._joined:
            torch.cuda.current_stream(self._device).wait_stream(self._beside)
            self._joined = True
        self._used.clear()

    def _engines(self, pieces: np.ndarray, stream: torch.cuda.Stream) -> None:
        for source, target, num_bytes in pieces.tolist():
            copy(target, source, num_bytes, stream)

    def _table(self, pieces: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(pieces)).pin_memory()
        return host.to(self._device, non_blocking=True)
