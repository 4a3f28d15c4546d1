"""The tiles of queries that expanded attention is cut into. Numpy on the host, which needs no Triton."""

from __future__ import annotations

import numpy as np

PREFILL_TILE = 128  # queries a tile
NO_TILE = -1  # segment of a padded tile


def tiles_of(segments: np.ndarray) -> np.ndarray:
    """Tiles [n, 2] int32 (segment, first query) of segments [S, 5] (query_begin, query_end, key_begin, key_end,
    first_key): longest first, so that the last programs to run are short ones.

    A tile's work is taken to be what it sees if the segment's last query sees the segment's last key.
    """
    tiles: list[tuple[int, int, int]] = []
    for index, (begin, end, key_begin, key_end, _) in enumerate(segments.tolist()):
        for first in range(begin, end, PREFILL_TILE):
            hidden = end - min(first + PREFILL_TILE, end)
            tiles.append((min(0, hidden - (key_end - key_begin)), index, first))
    tiles.sort()
    return np.array([tile[1:] for tile in tiles], np.int32).reshape(-1, 2)
