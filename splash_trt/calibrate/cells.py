"""The steps that calibration times (cells): what is in their batches, and the plans for them.

Plans are made here, not by the scheduler. A cell is one batch, which is repeated with other random ids; its contexts
are whatever is in the cache. Layouts take turns. The other ranks' heads (FULL residency) always stay in the arena, and
only pages below them are used, so that a change of layout is a new epoch and moves nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from splash_trt.cache.placement import num_pages
from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.partition import rank_counts, token_ranks
from splash_trt.layout.spec import SPECS, PlacementKind
from splash_trt.plan import SAMPLE, SAMPLING_DTYPE, Plan
from splash_trt.request import SamplingParams

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (64, 512, 2048, 8192, 32768)
CHUNKS = (16, 64, 256, 1024, 2048, 8192)
PREFIXES = (0, 512, 2048, 8192, 32768)
MOVED_PAGES = (4, 16)
PAGE_TOKENS = EngineConfig.page_tokens
"""Calibration uses the default."""
SEED = 1


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a cell may have at most: cache tokens on one rank, tokens of one context, requests, tokens of one step."""

    cache_tokens: int
    context: int
    requests: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A batch to time. rows: (cache rows before the step, tokens in the step, owner or home) of each request."""

    layout: Layout
    rows: tuple[tuple[int, int, int], ...]
    moved_pages: int = 0
    """So many pages go from rank 0 to rank 1, and as many back, before the rows run."""

    @property
    def name(self) -> str:
        decodes = [start + 1 for start, count, _ in self.rows if count == 1]
        chunks = [f"{count} after {start}" for start, count, _ in self.rows if count > 1]
        parts = []
        if decodes:
            mean, longest = sum(decodes) // len(decodes), max(decodes)
            # One long context among short ones keeps a few of a GPU's programs busy long after the others.
            parts = [f"{len(decodes)} decoding at {mean}" + (f" (longest {longest})" if longest > 2 * mean else "")]
        parts += [f"prompt {', '.join(chunks)}"] if chunks else []
        parts += [f"{self.moved_pages} pages moved"] if self.moved_pages else []
        return f"{self.layout.name.lower()} {' + '.join(parts)}"


def grid(layouts: tuple[Layout, ...], num_ranks: int, limits: Limits) -> list[Cell]:
    """Cells: decode batches x contexts, chunks of prompts x what precedes them, both together, and copies of pages with
    a decode batch."""
    batches = [_decodes(batch, context, num_ranks) for context in CONTEXTS for batch in BATCHES]
    batches += [((start, chunk, 0),) for start in PREFIXES for chunk in CHUNKS]
    for chunk in CHUNKS[1:]:
        batches += [(*_decodes(batch, 512, num_ranks), (512, chunk, 0)) for batch in (4, 16)]
        batches.append(tuple((0, chunk // 4, i % num_ranks) for i in range(4)))
    batches = [rows for rows in batches if _fits(rows, limits)]
    cells = [Cell(layout=layout, rows=rows) for rows in batches for layout in layouts]
    if num_ranks > 1:
        rows = _decodes(min(4, limits.requests), 64, num_ranks)
        cells += [Cell(layout=layouts[0], rows=rows, moved_pages=pages) for pages in MOVED_PAGES]
    return cells


def _decodes(batch: int, context: int, num_ranks: int) -> tuple[tuple[int, int, int], ...]:
    return tuple((context - 1, 1, i % num_ranks) for i in range(batch))


def random_cells(layouts: tuple[Layout, ...], num_ranks: int, limits: Limits, count: int, seed: int) -> list[Cell]:
    """Batches of random sizes, contexts and owners, as a real load has them and a grid does not."""
    source = random.Random(seed)
    found: list[Cell] = []
    while len(found) < count:
        rows = []
        longest = source.uniform(16, limits.context)
        for _ in range(round(limits.requests ** source.random()) - (source.random() < 0.1)):
            rows.append((round(longest ** source.uniform(0.4, 1)) - 1, 1, source.randrange(num_ranks)))
        if source.random() < 0.4 or not rows:
            chunk = round(8 * (limits.tokens / 8) ** source.random())
            rows.append((round(source.random() * max(0, longest - chunk)), chunk, source.randrange(num_ranks)))
        if _fits(tuple(rows), limits):
            found.append(Cell(layout=layouts[len(found) % len(layouts)], rows=tuple(rows)))
    return found


def _fits(rows: tuple[tuple[int, int, int], ...], limits: Limits) -> bool:
    """Whether a batch is within the limits in every layout, whoever owns the requests."""
    tokens = sum(count for _, count, _ in rows)
    cached = sum(num_pages(start + count, PAGE_TOKENS) * PAGE_TOKENS for start, count, _ in rows)
    longest = max(start + count for start, count, _ in rows)
    return (
        longest <= limits.context
        and cached <= limits.cache_tokens
        and len(rows) <= limits.requests
        and tokens <= limits.tokens
    )


class PlanMaker:
    """Makes the plans of cells, one after another, with rising numbers of steps and epochs."""

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self._config = config
        self._random = np.random.default_rng(SEED)
        self._vocab_size = vocab_size
        self._step = 0
        self._epoch = 0
        self._layout = config.layout

    def plans(self, cell: Cell, count: int) -> Iterator[Plan]:
        """`count` plans of the cell. The first carries block tables and sampling parameters: do not time it."""
        config, layout = self._config, cell.layout
        if layout is not self._layout:
            self._epoch, self._layout = self._epoch + 1, layout
        start, tokens, home = (np.array(column, np.int32) for column in zip(*cell.rows, strict=True))
        if SPECS[layout].placement is PlacementKind.REPLICATED:
            home = np.zeros_like(home)
        absorbed = tokens <= config.most_absorbed(layout)
        ranks = token_ranks(
            layout, home, start, tokens, absorbed, num_ranks=config.num_ranks, page_tokens=config.page_tokens
        )
        counts = rank_counts(ranks, int(tokens.sum()), config.num_ranks)
        want = np.cumsum(tokens) - 1
        tables, used = self._tables(cell, home)
        sampling, changes = _sampling(len(start)), tables
        for _ in range(count):
            self._step += 1
            yield Plan(
                step=self._step,
                epoch=self._epoch,
                layout=layout,
                slot=np.arange(len(start), dtype=np.int32),
                start=start,
                count=tokens,
                home=home,
                absorbed=absorbed,
                token=self._random.integers(0, self._vocab_size, int(tokens.sum())),
                want_index=want.astype(np.int32),
                want_target=np.full(len(want), SAMPLE, np.int64),
                counts=counts,
                armed=np.zeros(len(start), np.bool_),
                tables=changes,
                sampling=sampling,
                moves=_moves(cell.moved_pages, used, config.page_tokens),
            )
            sampling, changes = sampling[:0], changes[:0]

    def _tables(self, cell: Cell, home: np.ndarray) -> tuple[np.ndarray, int]:
        """Block tables [C, 4] of all ranks, and the first page that none of them uses."""
        ranks, kind = self._config.num_ranks, SPECS[cell.layout].placement
        entries, used = [], [0] * ranks
        for slot, (start, count, _) in enumerate(cell.rows):
            for page in range(num_pages(start + count, self._config.page_tokens)):
                owner = int(home[slot]) + (page if kind is PlacementKind.STRIPED else 0)
                for rank in range(ranks) if kind is PlacementKind.REPLICATED else (owner % ranks,):
                    entries.append((rank, slot, page, used[rank]))
                    used[rank] += 1
        return np.array(entries, np.int32), max(used)


def _sampling(count: int) -> np.ndarray:
    """Sampling parameters of `count` slots: the defaults."""
    out = np.zeros(count, SAMPLING_DTYPE)
    plain = SamplingParams()
    for name in SAMPLING_DTYPE.names or ():
        value = getattr(plain, name, None)
        if isinstance(value, int | float):
            out[name] = value
    out["slot"] = out["seed"] = np.arange(count)
    out["logprobs"] = -1
    return out


def _moves(pages: int, first: int, page_tokens: int) -> np.ndarray:
    """`moves` of unused pages, those from `first` on, from rank 0 to rank 1, and as many back."""
    there = [(0, first + i, 1, first + pages + i, 0, page_tokens) for i in range(pages)]
    back = [(1, first + i, 0, first + pages + i, 0, page_tokens) for i in range(pages)]
    return np.array(there + back, np.int32).reshape(-1, 6)
