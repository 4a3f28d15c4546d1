"""How contexts are cut into parts, so that a GPU's multiprocessors end decode attention at about the same time.

Decided once a step, for all its layers, on the host, which knows the contexts' lengths. Numpy; a kernel's programs take
a part each. A queries; a tile is 64 rows, whatever a kernel takes at a time. What a part costs besides its tiles, and
what merging costs, is as measured on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

TILE_ROWS = 64
MOST_PARTS = 128  # of one context
NUM_SMS = 132
# Of heads: what a program takes at most, and up to which two programs share a multiprocessor, from so many queries on.
BLOCK_HEADS, MOST_SHARED_HEADS, SHARED_FROM = 64, 32, 192
# What a part costs besides its tiles, in tiles: beginning and writing; being merged, of the context that has most; and
# of all parts together each head's 4 KB, written and read again at 2.5 TB/s where a tile takes 2.3 us.
_PART, _MERGED, _MERGED_HEAD = 2.0, 1 / 16, 0.00072
# Sizes that are tried: of equal parts of the longest context, and times the least that is possible.
_EQUAL, _STEPS = np.arange(1, 9), 1.1 ** np.arange(25)


@dataclass(frozen=True)
class Parts:
    """int32 on the device; all in contexts' order within a query."""

    part: torch.Tensor
    """[A + extra_parts(A), 3]: query, first row (a multiple of TILE_ROWS), rows; query -1 past the last."""
    read_part: torch.Tensor
    """[A, 2]: a query's first part and how many it has, one where it has no row."""
    merged: torch.Tensor
    """[min(A, extra_parts(A))]: queries with several parts; -1 past the last. Theirs are the first of all, so that
    twice extra_parts(A) hold what is to be merged."""


def num_sms_of(device: torch.device) -> int:
    """A GPU's own; on others, where parts are the same work in other pieces, an H200's."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else NUM_SMS


def extra_parts(queries: int) -> int:
    """Parts beyond one a query, at most, which with A are the arrays' size, as a captured graph fixes it. One context
    of few can fill an H200; of many only the longest are cut, and room that is not used takes time too."""
    return 128 if queries <= 64 else 64 if queries <= 128 else 32


def shares_sm(queries: int, heads: int) -> bool:
    """Whether two programs of Hopper's kernels fit on a multiprocessor."""
    return queries >= SHARED_FROM and heads <= MOST_SHARED_HEADS


def cut(length: np.ndarray, heads: int, num_sms: int = NUM_SMS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The fields of Parts for queries of length [A] rows and so many heads, 0 on ranks without."""
    if not length.any():  # a step that decodes nothing: there is nothing to weigh
        return _uncut(length, np.arange(len(length)))
    at_once = num_sms * (1 + shares_sm(len(length), heads)) // max(1, -(-heads // BLOCK_HEADS))
    return parts_of(length, part_tiles(-(-length // TILE_ROWS), max(1, at_once), heads))


def part_tiles(tiles: np.ndarray, at_once: int, heads: int) -> int:
    """Tiles that a part has at most, of contexts of tiles [A], for `at_once` programs at a time.

    What counts is the end of the last program. It comes no sooner than the end of the largest part, nor than that of
    equal shares; and if the parts take several rounds, some program's place has seen one of the last round and others
    before it, none of them smaller. Where there are more queries, a second or third tile in a part costs next to
    nothing, and parts are merged sooner.
    """
    extra = extra_parts(len(tiles))
    longest, total, live = int(tiles.max(initial=0)), int(tiles.sum()), int(np.count_nonzero(tiles))
    least = 1 if live <= 2 else 2 if live < 16 else 3
    lowest = max(least, -(-total // (live + extra)), -(-longest // MOST_PARTS))
    if longest <= lowest:
        return lowest
    ascending = np.sort(tiles)[len(tiles) - live :]
    size = np.concatenate([-(-longest // _EQUAL), np.ceil(lowest * _STEPS).astype(np.int64)])
    size = np.maximum(np.minimum(size, longest), lowest)
    whole = ascending.searchsorted(size, "right")  # so many contexts are not cut
    always = int(whole.min())  # whatever the size
    parts = np.ceil(ascending[always:].astype(np.float32) / size.astype(np.float32)[:, None]).sum(1) + always
    of_several = parts - whole
    sums = np.zeros(live + 1, np.int64)
    ascending.cumsum(out=sums[1:])
    # The largest of the last round: the cut ones, which come first, or whole.
    place = (np.ceil(parts / at_once) - 1) * at_once
    is_cut = place < of_several
    of_cut = (total - sums[whole]) / np.maximum(of_several, 1)
    of_whole = ascending[np.where(is_cut, 0, parts - 1 - place).astype(np.int64)]
    last = np.where(is_cut, of_cut, of_whole)
    end = np.maximum(size + _PART, (total + _PART * parts) / at_once)
    end = np.maximum(end, (place / at_once + 1) * (last + _PART)) + -(-longest // size) * _MERGED
    end += of_several * heads * _MERGED_HEAD
    end[parts > live + extra] = np.inf
    return int(size[end.argmin()])


def parts_of(length: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The fields of Parts where none has more than `size` tiles.

    Queries with several parts come first, then long ones before short ones: what is left at the end is small.
    """
    tiles = -(-length // TILE_ROWS)
    if int(tiles.max(initial=0)) <= size:
        return _uncut(length, np.argsort(-tiles, kind="stable"))
    queries, extra = len(length), extra_parts(len(length))
    count = np.maximum(-(-tiles // size), 1)
    several = count > 1
    order = np.argsort(-(tiles // count + several * (1 << 30)), kind="stable")
    num_several = int(np.count_nonzero(several))
    split, whole = order[:num_several], order[num_several:]
    counts = count[order]
    ends = counts.cumsum()
    begins = ends - counts
    num_split = int(ends[num_several - 1])
    num_parts = num_split + len(whole)
    assert num_parts <= queries + extra, (num_parts, queries, size)
    place = np.repeat(np.arange(num_several), counts[:num_several])  # in `split`, of each part of it
    index = np.arange(num_split) - begins[place]
    begin = index * tiles[split][place] // counts[place] * TILE_ROWS
    end = np.empty_like(begin)
    end[:-1], end[ends[:num_several] - 1] = begin[1:], length[split]
    part = np.zeros((queries + extra, 3), np.int32)
    part[:num_split, 0], part[:num_split, 1], part[:num_split, 2] = split[place], begin, end - begin
    part[num_split:num_parts, 0], part[num_split:num_parts, 2], part[num_parts:, 0] = whole, length[whole], -1
    read_part = np.empty((queries, 2), np.int32)
    read_part[order, 0], read_part[:, 1] = begins, count
    merged = np.full(min(queries, extra), -1, np.int32)
    merged[:num_several] = split
    return part, read_part, merged


def _uncut(length: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The fields of Parts where each of the queries, in that order, is one."""
    queries, extra = len(length), extra_parts(len(length))
    part = np.zeros((queries + extra, 3), np.int32)
    part[:queries, 0], part[queries:, 0], part[:queries, 2] = order, -1, length[order]
    read_part = np.ones((queries, 2), np.int32)
    read_part[order, 0] = np.arange(queries)
    return part, read_part, np.full(min(queries, extra), -1, np.int32)
