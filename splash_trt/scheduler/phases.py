"""The work ahead, cut into phases in which the batch hardly changes, and how long each would take under a layout.

First the prompts that are known and the queue behind the running requests; then what runs decodes on, fewer and fewer.
Requests that keep arriving are a part of every phase. R running requests, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import SPECS, PlacementKind
from splash_trt.scheduler.batch import Batch
from splash_trt.scheduler.cost_model import CostModel
from splash_trt.scheduler.load import Load

LIVES = (0.0, 0.4, 1.5, 4.0)  # bounds of the decoding phases, in mean remaining lives of the running requests
FULL = 0.97  # of the cache: beyond it requests get in each other's way
RARE = 0.01  # share of steps below which the 99th percentile does not see them


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of work, the same for all layouts. Requests are counted in fractions: they end by chance."""

    alive: np.ndarray
    """[R]: the chance of each running request to take part, about half way."""
    context: np.ndarray
    """[R]: its cache rows about half way."""
    joining: float
    """Further requests that take part where there is room for them."""
    joining_context: float
    """Cache rows of one of them, about half way through its life."""
    tokens: float
    """Output to be made by all of them."""
    prefill_tokens: float
    prompt: float
    """Tokens of the prompt that one of prefill_tokens belongs to, on average."""
    owners: float
    """So many owners share prefill_tokens evenly, in effect: one prompt has one."""
    arriving_s: float = 0.0
    """Prompt tokens per second, where prefill_tokens are yet to come; 0: they are there."""
    presence: float = 1.0
    """The chance that there is anything to do at all."""
    ends: float = 0.0
    """The chance that all of the work ends in this phase."""


@dataclass(frozen=True, kw_only=True)
class Time:
    """What a phase takes under one layout."""

    seconds: float
    steps: float
    p99_step_s: float
    """The step that only one in a hundred exceeds: what a running request waits for its next token."""
    concurrency: float
    """Requests that run at once."""


def phases_of(load: Load, step_s: float) -> list[Phase]:
    """What is ahead. step_s: what a step takes now, which tells how many requests arrive meanwhile."""
    found: list[Phase] = []
    prompts = np.concatenate([load.prefill[load.prefill > 0], load.waiting_prompts]).astype(np.float64)
    context = load.held + load.prefill
    if len(prompts):
        prefill = float(prompts.sum())
        found.append(
            Phase(
                alive=np.ones(load.running),
                context=context.astype(np.float64),
                joining=load.waiting,
                joining_context=load.waiting_tokens / max(load.waiting, 1) + load.waiting_left / 2,
                tokens=load.waiting * load.waiting_left,
                prefill_tokens=prefill,
                prompt=float((prompts**2).sum()) / prefill,
                owners=_owners(prompts, load.num_ranks),
                ends=0.0 if load.running else 1.0,
            )
        )
    if load.running:
        life = float(load.left.mean())
        prompt = float((context - load.generated).mean())
        arriving, to_come = load.arriving, load.arriving.most_tokens
        newcomers = arriving.per_s * load.waiting_left * step_s
        going = [min(float(np.exp(-x * life / np.maximum(load.left, 1.0)).sum()) + newcomers, 1.0) for x in LIVES[:-1]]
        ends = -np.diff([*going, 0.0])
        for begin, end, ending in zip(LIVES[:-1], LIVES[1:], ends.tolist(), strict=True):
            steps, middle = (end - begin) * life, (begin + end) / 2 * life
            alive = np.exp(-middle / np.maximum(load.left, 1.0))
            expected = float(alive.sum())
            tokens = min(arriving.tokens_s * step_s * steps, to_come)
            to_come -= tokens
            found.append(
                Phase(
                    alive=alive / min(expected, 1.0),
                    context=context + middle,
                    joining=newcomers,
                    joining_context=prompt + load.waiting_left / 2,
                    tokens=steps * (max(expected, 1.0) + newcomers),
                    prefill_tokens=tokens,
                    prompt=arriving.prompt,
                    owners=1.0,
                    arriving_s=arriving.tokens_s,
                    presence=min(expected + newcomers, 1.0),
                    ends=ending,
                )
            )
    return found


def _owners(prompts: np.ndarray, num_ranks: int) -> float:
    """So many owners share the tokens of `prompts` [P] evenly, in effect. Those above an even share are computed alone,
    after the others: the short ones' share and the long ones' take turns."""
    total = float(prompts.sum())
    long = prompts > total / num_ranks
    longer = float(prompts[long].sum())
    busiest = (total - longer) / num_ranks + (longer / min(int(long.sum()), num_ranks) if longer else 0.0)
    return total / busiest


def homes_under(layout: Layout, load: Load) -> np.ndarray:
    """[R]: owners or homes that the running requests would have: as they are where there are any, else dealt out, the
    largest first, to and fro over the ranks."""
    if SPECS[layout].placement is PlacementKind.REPLICATED:
        return np.zeros(load.running, np.int64)
    if SPECS[load.layout].placement is not PlacementKind.REPLICATED:
        return load.home
    n = load.num_ranks
    homes = np.empty(load.running, np.int64)
    turn = np.arange(load.running) % (2 * n)
    homes[np.argsort(-load.held, kind="stable")] = np.where(turn < n, turn, 2 * n - 1 - turn)
    return homes


class Estimator:
    """Times phases. room: distinct tokens that each layout holds."""

    def __init__(self, cost: CostModel, config: EngineConfig, room: dict[Layout, int]) -> None:
        self.cost = cost
        self._config = config
        self._room = room

    def moved_s(self, num_bytes: float) -> float:
        """By how much copies of num_bytes, in and out at the busiest rank, lengthen the steps beside them."""
        return self.cost.copies_s(num_bytes, self._config.layout)

    def time(self, phase: Phase, layout: Layout, homes: np.ndarray) -> Time:
        """What `phase` takes with the running requests at homes [R]."""
        alive, running = phase.alive, float(phase.alive.sum())
        demand = float((alive * phase.context).sum())
        room = FULL * self._room[layout]
        joining = 0.0
        prefill = phase.prefill_tokens
        if demand > room:  # some have to give their cache up, and are computed again later
            prefill += demand - room
            alive = alive * (room / demand)
            running = float(alive.sum())
        elif phase.joining:
            places = min((room - demand) / max(phase.joining_context, 1.0), self._config.max_running - running)
            joining = min(phase.joining, max(places, 0.0 if running else 1.0))
        concurrency = running + joining
        decode = self._batch(phase, layout, homes, alive, joining, 0.0)
        decode_s = self.cost.step_s(decode) if concurrency else 0.0
        steps = phase.tokens / concurrency if concurrency else 0.0
        mixed, mixed_s = 0.0, 0.0
        if prefill > 0:
            most = max(self._config.max_batch_tokens - concurrency, 1.0)
            chunk = min(most, max(phase.prefill_tokens, 1.0))
            if phase.arriving_s:  # a step computes what came during the one before
                chunk = min(most, max(phase.prompt, phase.arriving_s * decode_s))
            # Those that wait for their prompts to be computed do not decode yet.
            mixed_s = self.cost.step_s(self._batch(phase, layout, homes, alive, 0.0, chunk))
            if phase.arriving_s * mixed_s > 1.2 * chunk:
                chunk = min(most, phase.arriving_s * mixed_s)
                mixed_s = self.cost.step_s(self._batch(phase, layout, homes, alive, 0.0, chunk))
            mixed = prefill / chunk
        seconds = mixed * mixed_s + max(steps - mixed, 0.0) * decode_s
        total = max(steps, mixed, 1e-9)
        return Time(
            seconds=seconds * phase.presence,
            steps=total * phase.presence,
            p99_step_s=mixed_s if mixed / total > RARE else decode_s,
            concurrency=concurrency,
        )

    def _batch(
        self, phase: Phase, layout: Layout, homes: np.ndarray, alive: np.ndarray, joining: float, chunk: float
    ) -> Batch:
        """A step of the phase: one token of each that decodes, and `chunk` tokens of prompts."""
        n = self._config.num_ranks
        tokens: np.ndarray = np.bincount(homes, alive, n)
        context: np.ndarray = np.bincount(homes, alive * phase.context, n)
        replicated = SPECS[layout].placement is PlacementKind.REPLICATED
        if joining:
            more = np.zeros(n)
            if replicated:
                more[0] = joining
            else:
                more = level(tokens, joining)
            tokens, context = tokens + more, context + more * phase.joining_context
        prefill, pairs, reached = np.zeros(n), np.zeros(n), np.zeros(n)
        if chunk:
            prompt = max(phase.prompt, 1.0)
            at_once = max(chunk / prompt, 1.0)  # prompts in one chunk
            ranks = 1 if replicated else int(min(max(round(phase.owners if phase.owners > 1 else at_once), 1), n))
            middle = min((prompt + min(chunk, prompt)) / 2, prompt)  # where a chunk ends, on average
            prefill[:ranks] = chunk / ranks
            pairs[:ranks] = chunk / ranks * prompt / 2
            reached[:ranks] = at_once / ranks * middle
        return Batch(
            layout=layout,
            decode_tokens=tokens,
            decode_context=context,
            prefill_tokens=prefill,
            prefill_pairs=pairs,
            prefill_context=reached,
            sampled=int(np.ceil(tokens.sum())) + bool(chunk),
            decode_longest=int(phase.context.max(initial=0.0)) if len(homes) else 0,
        )


def level(counts: np.ndarray, more: float) -> np.ndarray:
    """[N] how `more` requests are dealt to ranks with `counts` [N] so that the largest count is as small as can be;
    whole ones first, since half a request keeps a rank as busy as one."""
    order = np.argsort(counts, kind="stable")
    ranked = counts[order]
    sums = np.arange(1, len(counts) + 1) * ranked - np.cumsum(ranked)  # to lift those below up to each one
    full = int(np.searchsorted(sums, more, side="right"))  # ranks that get some
    height = (more + ranked[:full].sum()) / full
    out = np.zeros_like(counts)
    out[order[:full]] = height - ranked[:full]
    if more < full:  # fewer requests than ranks
        out[:] = 0
        out[order[: max(int(more), 1)]] = more / max(int(more), 1)
    return out
