"""Copies a step's arrays to the device, all in one copy, from pinned memory, so that the host goes on meanwhile."""

from __future__ import annotations

import numpy as np
import torch

from splash_plugins.mla_attention.tiles import NO_TILE, tiles_of
from splash_trt.runtime.device_step import DeviceRound, DeviceStep
from splash_trt.runtime.step_arrays import StepArrays

_ALIGNMENT = 16
_ROUND_FIELDS = ("holder", "page", "offset", "segments")


class Uploader:
    """fixed_bytes: size of the memory at a fixed address, where captured graphs read their step's arrays."""

    def __init__(self, device: torch.device, fixed_bytes: int) -> None:
        self._device = device
        self._fixed = torch.zeros(fixed_bytes, dtype=torch.uint8, device=device)

    def __call__(self, step: StepArrays, *, fixed: bool) -> DeviceStep:
        """fixed: put the arrays at the addresses that the captured graph of this shape reads."""
        arrays = dict(step.arrays)
        for index, part in enumerate(step.rounds):
            arrays |= {f"{name}.{index}": getattr(part, name) for name in _ROUND_FIELDS}
            tiles = tiles_of(part.segments)
            missing = step.shape.tiles - len(tiles) if step.padded else 0
            assert missing >= 0, "a graph works through no more tiles than its shape has"
            arrays[f"tiles.{index}"] = np.pad(tiles, ((0, missing), (0, 0)), constant_values=NO_TILE)
        found = self._copy(arrays, fixed)
        rounds = tuple(
            DeviceRound(
                num_rows=part.num_rows,
                tiles=found[f"tiles.{index}"],
                **{name: found[f"{name}.{index}"] for name in _ROUND_FIELDS},
            )
            for index, part in enumerate(step.rounds)
        )
        return DeviceStep(
            shape=step.shape,
            arrays={name: found[name] for name in step.arrays},
            counts=step.counts,
            absorbed_counts=step.absorbed_counts,
            rounds=rounds,
        )

    def plain(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """These arrays on the device."""
        found = self._copy({str(index): array for index, array in enumerate(arrays)}, fixed=False)
        return list(found.values())

    def _copy(self, arrays: dict[str, np.ndarray], fixed: bool) -> dict[str, torch.Tensor]:
        places, used = {}, 0
        for name, array in arrays.items():
            places[name] = used
            used = -(-(used + array.nbytes) // _ALIGNMENT) * _ALIGNMENT
        # It may go out of scope at once: torch's allocator does not reuse pinned memory that a copy still reads.
        host = torch.empty(used, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        view = host.numpy()
        for name, array in arrays.items():
            view[places[name] : places[name] + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if fixed:
            target = self._fixed[:used]
            target.copy_(host, non_blocking=True)
        else:
            target = host.to(self._device, non_blocking=True)
        return {
            name: target[places[name] : places[name] + array.nbytes]
            .view(torch.from_numpy(array[:0].copy()).dtype)
            .view(array.shape)
            for name, array in arrays.items()
        }
