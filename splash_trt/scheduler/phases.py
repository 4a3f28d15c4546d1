"""The work ahead, cut into phases in which the batch hardly changes, and how long each would take under a layout.

First the prompts that are known and the queue behind the running requests; then what runs decodes on, fewer and fewer.
Requests that keep arriving are a part of every phase. R running requests, N ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import SPECS, PlacementKind, Tokens
from splash_trt.scheduler.batch import Batch
from splash_trt.scheduler.cost_model import CostModel
from splash_trt.scheduler.forecast import Halves, halves
from splash_trt.scheduler.load import Load

LIVES = (0.0, 0.4, 1.5, 4.0)  # bounds of the decoding phases, in mean remaining lives of the running requests
FULL = 0.97  # of the cache: beyond it requests get in each other's way
PLACES = 64  # in the longest prompt
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
    answer: float
    """Tokens of output of one of them."""
    tokens: float
    """Output to be made by all of them."""
    prefill_tokens: float
    prompts: Halves
    """Those that prefill_tokens belong to."""
    owners: float
    """So many owners share prefill_tokens evenly, in effect: one prompt has one."""
    farthest: float
    """How far into its prompt the one of them is that is farthest, on average, when each computes one of its own."""
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
    held: float
    """Cache rows of theirs."""


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
                answer=max(load.waiting_left, 1.0),
                tokens=load.waiting * load.waiting_left,
                prefill_tokens=prefill,
                prompts=halves(ranked := np.sort(prompts), ranked**2),
                owners=(owners := _owners(prompts, load.num_ranks)),
                farthest=_farthest(prompts, round(owners)),
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
                    answer=max(load.waiting_left, 1.0),
                    tokens=steps * (max(expected, 1.0) + newcomers),
                    prefill_tokens=tokens,
                    prompts=arriving.prompts,
                    owners=1.0,
                    farthest=0.0,
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


def _farthest(prompts: np.ndarray, owners: int) -> float:
    """The largest, on average, of so many draws of a token's place in its prompt, from all tokens of `prompts` [P]."""
    ranked = np.sort(prompts)
    places = np.linspace(0.0, ranked[-1], PLACES + 1)
    shorter = np.searchsorted(ranked, places, side="right")
    # Tokens at a place or before it: the shorter prompts whole, and so many of each other one.
    before = np.append(0.0, np.cumsum(ranked))[shorter] + places * (len(ranked) - shorter)
    beyond = 1 - (before / before[-1]) ** owners
    return float(((beyond[1:] + beyond[:-1]) / 2).sum() * places[1])


def computes_alone(layout: Layout) -> bool:
    """Whether a prompt is computed by its owner alone, so that several are computed side by side."""
    spec = SPECS[layout]
    return spec.placement is PlacementKind.OWNED and spec.tokens is Tokens.SPREAD


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
        joining, at_once = 0.0, 1.0  # at_once: the share of those that join for which there is room now
        prefill = phase.prefill_tokens
        if demand > room:  # some have to give their cache up, and are computed again later
            phase = phase if phase.prompts else replace(phase, prompts=((1.0, max(demand / running, 1.0)),))
            prefill += demand - room
            alive = alive * (room / demand)
            running = float(alive.sum())
        elif phase.joining:
            places = min((room - demand) / max(phase.joining_context, 1.0), self._config.max_running - running)
            joining = min(phase.joining, max(places, 0.0 if running else 1.0))
            at_once = joining / phase.joining
        concurrency = running + joining
        decode_s = self.cost.step_s(self._batch(phase, layout, homes, alive, joining)) if concurrency else 0.0
        steps = phase.tokens / concurrency if concurrency else 0.0
        most = max(self._config.max_batch_tokens - concurrency, 1.0)
        seconds = mixed = p99_s = 0.0
        for part in _parts(phase, prefill, at_once, concurrency, decode_s, most):
            part, mean_s, longest_s = self._mixed(phase, layout, homes, alive, part, most)
            mixed += part.tokens / part.chunk
            seconds += part.tokens / part.chunk * mean_s
            p99_s = max(p99_s, longest_s)
        total = max(steps, mixed, 1e-9)
        return Time(
            seconds=(seconds + max(steps - mixed, 0.0) * decode_s) * phase.presence,
            steps=total * phase.presence,
            p99_step_s=p99_s if mixed / total > RARE else decode_s,
            concurrency=concurrency,
            held=min(demand, room) + joining * phase.joining_context,
        )

    def _mixed(
        self, phase: Phase, layout: Layout, homes: np.ndarray, alive: np.ndarray, part: _Part, most: float
    ) -> tuple[_Part, float, float]:
        """(`part` with what a step has of it in the end, the mean time of these steps, the longest class's). What comes
        while such a step lasts is what the next one has; beyond `most`, prompts queue at more and more owners."""
        alone, ranks = computes_alone(layout), self._config.num_ranks
        while True:
            # Long and short prompts have steps of their own, unless owners compute them side by side.
            mixed = alone and part.owners > 1
            classes = ((1.0, sum(share * p for share, p in phase.prompts)),) if mixed else phase.prompts
            # Those that wait for their prompts to be computed do not decode yet.
            times = [self.cost.step_s(self._batch(phase, layout, homes, alive, 0.0, part, p)) for _, p in classes]
            mean_s = sum(share * s for (share, _), s in zip(classes, times, strict=True))
            full, comes = part.chunk >= most, part.per_s * mean_s
            if comes <= 1.2 * part.chunk or full and not (alone and part.owners < ranks):
                return part, mean_s, max(times)
            part = part.growing(comes, 2 * part.owners if full else 0.0, most)

    def _batch(
        self,
        phase: Phase,
        layout: Layout,
        homes: np.ndarray,
        alive: np.ndarray,
        joining: float,
        part: _Part | None = None,
        prompt: float = 1.0,
    ) -> Batch:
        """A step of the phase: one token of each that decodes, and what `part` has of prompts of one length."""
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
        if part is not None:
            chunk, alone = part.chunk, computes_alone(layout)
            ranks = 1 if replicated else min(max(round(part.owners if alone else chunk / prompt), 1), n)
            share = chunk / ranks
            run = share if alone else chunk  # tokens that are taken from prompts one after the other
            prefill[:ranks] = share
            before = np.full(ranks, prompt / 2)  # of the prompt, on average
            if alone and ranks > 1:  # all wait for the one that is farthest in its prompt
                before[0] = max(part.farthest, prompt / 2)
            pairs[:ranks] = share * before
            # Each chunk reaches all that comes before it: prompts side by side are cut into more of them.
            reached[:ranks] = share / min(run, prompt) * (before + min(run, prompt) / 2)
        return Batch(
            layout=layout,
            decode_tokens=tokens,
            decode_context=context,
            prefill_tokens=prefill,
            prefill_pairs=pairs,
            prefill_context=reached,
            sampled=int(np.ceil(tokens.sum())) + (part is not None),
            decode_longest=int(phase.context.max(initial=0.0)) if len(homes) else 0,
        )


@dataclass(frozen=True)
class _Part:
    """Tokens of prompts that are computed in the same way."""

    tokens: float
    """All of them."""
    chunk: float
    """What a step computes of them, if it does at all."""
    owners: float
    """So many share it, where each computes prompts of its own."""
    prompt: float
    """What a prompt has of them, on average, but at most what a step takes."""
    farthest: float = 0.0
    per_s: float = 0.0
    """So many come in a second; 0: all are there."""

    def growing(self, comes: float, owners: float, most: float) -> _Part:
        """With what a step has that has any, where so many tokens come during one, by chance; owners: at least."""
        number = max(comes, 1.0) / self.prompt
        number = max(number / -math.expm1(-number), owners)
        return replace(self, chunk=min(number * self.prompt, most), owners=number)


def _parts(
    phase: Phase, prefill: float, at_once: float, concurrency: float, decode_s: float, most: float
) -> list[_Part]:
    """What a phase has of prompts. at_once: the share of them for which there is room now."""
    if not prefill:
        return []
    length = 1 / sum(share / length for share, length in phase.prompts)
    prompt = min(length, most)
    one_by_one = _Part(prefill, prompt, 1.0, prompt, per_s=phase.arriving_s)
    if at_once == 1.0 and phase.arriving_s:  # a step computes what came during the one before
        return [one_by_one.growing(phase.arriving_s * decode_s, 1.0, most)]
    chunk = min(max(phase.prefill_tokens, 1.0), most)
    there = 0.0 if phase.arriving_s else prefill * at_once
    found = [_Part(there, chunk, phase.owners, prompt, farthest=phase.farthest)] if there else []
    if at_once < 1.0:  # others have to wait until those that run end
        comes = length * concurrency / phase.answer
        found.append(replace(one_by_one, tokens=prefill - there, per_s=0.0).growing(comes, 1.0, most))
    return found


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
