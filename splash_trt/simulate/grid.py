"""Which layout is fastest for which shape of load, from the cost model alone, without a scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import PlacementKind
from splash_trt.memory.map import Capacity, capacity
from splash_trt.models.config import ModelConfig
from splash_trt.scheduler.batch import Batch
from splash_trt.simulate.engine import StepCost

NO_ROOM = -1
LAYOUTS = tuple(Layout)


def shape(
    layout: Layout, num_ranks: int, concurrency: int, context: int, prompt_begin: int = 0, prompt_count: int = 0
) -> Batch:
    """A step in which `concurrency` requests with `context` rows each, spread evenly over ranks, get a token, and
    prompt_count tokens of a prompt are computed from prompt_begin on, on a rank that has the fewest requests."""
    tokens = np.full(num_ranks, concurrency // num_ranks, np.float64)
    tokens[: concurrency % num_ranks] += 1
    chunk = np.zeros(num_ranks)
    chunk[-1] = prompt_count
    return Batch(
        layout=layout,
        decode_tokens=tokens,
        decode_context=tokens * context,
        prefill_tokens=chunk,
        prefill_pairs=chunk * (prompt_begin + (prompt_count + 1) / 2),
        prefill_context=np.where(chunk > 0, float(prompt_begin + prompt_count), 0.0),
        sampled=concurrency,
        decode_longest=context if concurrency else 0,
    )


def seconds(
    cost: StepCost, config: EngineConfig, layout: Layout, concurrency: int, context: int, prompt: int
) -> float:
    """Seconds until a prompt is computed, chunk by chunk, while `concurrency` requests decode; of one decode step if
    `prompt` is 0."""
    if not prompt:
        return cost.step_s(shape(layout, config.num_ranks, concurrency, context))
    total, begin = 0.0, 0
    while begin < prompt:
        count = min(prompt - begin, max(1, config.max_batch_tokens - concurrency))
        total += cost.step_s(shape(layout, config.num_ranks, concurrency, context, begin, count))
        begin += count
    return total


def rooms(model: ModelConfig, config: EngineConfig) -> dict[Layout, Capacity]:
    """What each layout's cache holds if it is the only one of its deployment; without layouts whose weights do not fit.
    """
    found = {}
    for layout in LAYOUTS:
        try:
            found[layout] = capacity(model, dataclasses.replace(config, layout=layout, layouts=()), layout)
        except ValueError:
            continue
    return found


def holds(room: Capacity, num_ranks: int, concurrency: int, context: int, prompt: int) -> bool:
    """Whether the cache holds `concurrency` requests of `context` tokens, spread evenly, and a prompt."""
    pages, own = -(-context // room.page_tokens), -(-prompt // room.page_tokens)
    if room.placement is PlacementKind.OWNED:
        # The last rank has the prompt, and the fewest of the requests.
        most, least = -(-concurrency // num_ranks), concurrency // num_ranks
        return max(most * pages, least * pages + own) <= min(room.pages_per_rank)
    return concurrency * pages + own <= room.total_pages


@dataclass(frozen=True)
class Map:
    """Which layout is the fastest. Axes: prompts [P], contexts [X], concurrencies [Y]."""

    prompts: tuple[int, ...]
    contexts: tuple[int, ...]
    concurrencies: tuple[int, ...]
    best: np.ndarray
    """[P, Y, X] int: a layout, or NO_ROOM where no layout holds that much."""
    gain: np.ndarray
    """[P, Y, X]: the time of the second best layout that has room, over that of the best; infinite if there is none."""


def best_layouts(
    model: ModelConfig,
    config: EngineConfig,
    cost: StepCost,
    *,
    prompts: Sequence[int],
    contexts: Sequence[int],
    concurrencies: Sequence[int],
) -> Map:
    """The map of all combinations of these prompts, contexts and concurrencies."""
    found = rooms(model, config)
    best = np.full((len(prompts), len(concurrencies), len(contexts)), NO_ROOM)
    gain = np.full(best.shape, np.inf)
    for p, y, x in np.ndindex(best.shape):
        point = (concurrencies[y], contexts[x], prompts[p])
        times = sorted(
            (seconds(cost, config, layout, *point), layout)
            for layout, room in found.items()
            if holds(room, config.num_ranks, *point)
        )
        if times:
            best[p, y, x] = times[0][1]
        if len(times) > 1:
            gain[p, y, x] = times[1][0] / times[0][0]
    return Map(tuple(prompts), tuple(contexts), tuple(concurrencies), best, gain)
