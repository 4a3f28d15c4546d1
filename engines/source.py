"""A built engine as a source of weights: reads a rank's part of a tensor and checks every byte that is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path

import torch

from splash_engines.manifest import DTYPES, Manifest, Part, StoredTensor, checksum, row_bytes
from splash_trt.weights.spec import TensorSpec, part_of_experts, tensor_specs


class EngineSource:
    """WeightSource over the files of a built engine.

    Reads whole chunks and checks each chunk's checksum before any of its numbers is used. Keeps no file open and no
    state, so several threads may read at the same time. Needs the memory of one chunk.
    """

    def __init__(self, manifest: Manifest, paths: Sequence[Path]) -> None:
        self.model = manifest.model
        self._paths = paths
        self._tensors = {tensor.name: tensor for tensor in manifest.tensors}
        self._stored_axes = {spec.name: spec.axis for spec in tensor_specs(manifest.model)}

    def read(self, spec: TensorSpec, begin: int, end: int, out: torch.Tensor) -> None:
        """Rows [begin, end) of the tensor along spec.axis, converted to out's dtype; see WeightSource.

        ValueError names a file that is missing, cut short, or holds other bytes than when the engine was built.
        """
        assert 0 <= begin <= end <= spec.shape[spec.axis], (spec.name, begin, end)
        assert out.shape == (*spec.shape[: spec.axis], end - begin, *spec.shape[spec.axis + 1 :]), (spec, out.shape)
        tensor = self._tensors[spec.name]
        assert tensor.shape == spec.shape, (tensor.shape, spec)
        if len(tensor.parts) > 1:
            self._read_experts(tensor, spec, begin, end, out)
        elif spec.axis == self._stored_axes[spec.name]:
            target = out.movedim(spec.axis, 0)
            for first, rows in self._rows(tensor, tensor.parts[0], begin, end):
                at = first - begin
                target[at : at + len(rows)].copy_(rows.view(-1, *target.shape[1:]))
        else:  # experts' tensors that are stored expert by expert, but cut inside experts: every rank reads all of it
            for first, rows in self._rows(tensor, tensor.parts[0], 0, spec.shape[0]):
                part = rows.view(-1, *spec.shape[1:]).narrow(spec.axis, begin, end - begin)
                out[first : first + len(rows)].copy_(part)

    def _read_experts(self, tensor: StoredTensor, spec: TensorSpec, begin: int, end: int, out: torch.Tensor) -> None:
        """`read` for a tensor that is stored in several parts for each expert, which together are the expert's rows."""
        each = len(tensor.parts) // spec.shape[0]
        experts, wanted, columns = part_of_experts(spec.shape, spec.axis, begin, end)
        for expert, target in zip(experts, out, strict=True):
            for i in range(each):
                part = tensor.parts[expert * each + i]
                before = i * part.rows
                low, high = max(wanted.start, before), min(wanted.stop, before + part.rows)
                for first, rows in self._rows(tensor, part, low - before, high - before):
                    at = before + first - wanted.start
                    target[at : at + len(rows)].copy_(rows[:, columns])

    def verify(self, tensor: StoredTensor, part: Part) -> int:
        """Reads all of a part and checks it. Returns its size in bytes."""
        return sum(rows.numel() * rows.itemsize for _, rows in self._rows(tensor, part, 0, part.rows))

    def _rows(self, tensor: StoredTensor, part: Part, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Rows [begin, end) of a part, chunk by chunk: the first row's index and the rows, [n, numbers of a row]."""
        if begin >= end:
            return
        path, width = self._paths[part.file], row_bytes(tensor, part)
        try:
            with path.open("rb", buffering=0) as file:
                for chunk in range(begin // part.chunk_rows, -(-end // part.chunk_rows)):
                    first = chunk * part.chunk_rows
                    last = min(first + part.chunk_rows, part.rows)
                    file.seek(part.offset + first * width)
                    data = bytearray((last - first) * width)
                    if not _fill(file, data) or checksum(data) != part.checksums[chunk]:
                        raise ValueError(
                            f"{path}: was changed, damaged or cut short after the engine was built: {tensor.name} "
                            f"differs in bytes {part.offset + first * width} to {part.offset + last * width}; restore "
                            "the file or build the engine again (splash-trt build … --overwrite)"
                        )
                    rows = torch.frombuffer(data, dtype=DTYPES[part.dtype]).view(last - first, -1)
                    low, high = max(first, begin), min(last, end)
                    yield low, rows[low - first : high - first]
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error


def _fill(file: FileIO, data: bytearray) -> bool:
    """Reads until `data` is full; False if the file ends before that."""
    view = memoryview(data)
    while view:
        count = file.readinto(view)
        if not count:
            return False
        view = view[count:]
    return True
