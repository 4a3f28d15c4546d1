"""Many pieces between addresses, against copies by the host."""

from __future__ import annotations

import pytest
import torch

from splash_plugins.piece_copy.kernel import BLOCK_BYTES, piece_copy

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("programs", [1, 3, 100])
def test_pieces_arrive_and_nothing_else_changes(device: str, unit: int, programs: int) -> None:
    generator = torch.Generator().manual_seed(unit)
    lengths = [unit, 3 * unit, 0, 72 * unit, BLOCK_BYTES, BLOCK_BYTES + unit, 2 * BLOCK_BYTES - unit]
    size = sum(lengths) + 2 * unit * len(lengths) + 64
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    expected = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    there, target = source.to(device), expected.to(device)
    pieces, read, written = [], unit, 2 * unit
    for length in lengths:
        pieces.append((there.data_ptr() + read, target.data_ptr() + written, length))
        expected[written : written + length] = source[read : read + length]
        read, written = read + length + unit, written + length + 2 * unit
    pieces = [pieces[i] for i in torch.randperm(len(pieces), generator=generator).tolist()]
    piece_copy(torch.tensor(pieces, dtype=torch.int64, device=device), unit, programs)
    assert torch.equal(target.cpu(), expected)
    assert torch.equal(there.cpu(), source)


def test_no_piece_is_no_launch(device: str) -> None:
    piece_copy(torch.zeros((0, 3), dtype=torch.int64, device=device), 16, 4)
