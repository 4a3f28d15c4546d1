"""Cuts the queries of expanded (prefill) attention into tiles. Numpy, on the host; needs no Triton."""

from __future__ import annotations

import numpy as np

PREFILL_TILE = 128  # queries in a tile
NO_TILE = -1  # the segment of a tile that is padding


def tiles_of(segments: np.ndarray) -> np.ndarray:
    """The tiles [n, 2] int32 (segment, first query) of segments [S, 5] (query_begin, query_end, key_begin, key_end,
    first_key; see prefill_kernel.prefill). Tiles with most work come first, so that the programs that run last are
    short.

    A tile's work is estimated as the keys that it sees if the segment's last query sees the segment's last key.
    """
    tiles: list[tuple[int, int, int]] = []
    for index, (begin, end, key_begin, key_end, _) in enumerate(segments.tolist()):
        for first in range(begin, end, PREFILL_TILE):
            hidden = end - min(first + PREFILL_TILE, end)
            tiles.append((min(0, hidden - (key_end - key_begin)), index, first))
    tiles.sort()
    return np.array([tile[1:] for tile in tiles], np.int32).reshape(-1, 2)
