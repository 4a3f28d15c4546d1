"""How long a phase of the work ahead (phases.py) would take under a layout. R running requests, N ranks."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from msgspec.structs import replace as changed

from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import SPECS, PlacementKind, Tokens
from splash_trt.scheduler.batch import Batch
from splash_trt.scheduler.cost_model import CostModel
from splash_trt.scheduler.forecast import Halves
from splash_trt.scheduler.phases import Phase, Prompts

FULL = 0.97  # of the cache: beyond it requests get in each other's way
RARE = 0.01  # share of steps below which the 99th percentile does not see them


class Time(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a phase takes under one layout."""

    seconds: float
    steps: float
    p99_step_s: float
    """The step that only one in a hundred exceeds: what a running request waits for its next token."""
    concurrency: float
    """Requests that run at once."""
    held: float
    """Cache rows of theirs."""


def computes_alone(layout: Layout) -> bool:
    """Whether a prompt is computed by its owner alone, so that several are computed side by side."""
    spec = SPECS[layout]
    return spec.placement is PlacementKind.OWNED and spec.tokens is Tokens.SPREAD


class Estimator:
    """Times phases. room: distinct tokens that each layout holds."""

    def __init__(self, cost: CostModel, config: EngineConfig, room: dict[Layout, int]) -> None:
        self.cost = cost
        self._config = config
        self._room = room
        self._ranks = config.num_ranks
        self._nothing = np.zeros(config.num_ranks)

    def moved_s(self, num_bytes: float) -> float:
        """By how much copies of num_bytes, in and out at the busiest rank, lengthen the steps beside them."""
        return self.cost.copies_s(num_bytes, self._config.layout)

    def time(self, phase: Phase, layout: Layout, homes: np.ndarray) -> Time:
        """What `phase` takes with the running requests at homes [R]."""
        alive, held, running, demand = phase.alive, phase.held, phase.running, phase.demand
        room = FULL * self._room[layout]
        joining, places = 0.0, math.inf  # places: so many more have room now
        prompts = phase.prompts
        if demand > room:  # some have to give their cache up, and are computed again later
            again = Prompts(tokens=demand - room, lengths=((1.0, max(demand / running, 1.0)),))
            prompts = (*prompts, again)
            alive = alive * (room / demand)
            held = alive * phase.context
            running = float(alive.sum())
        elif phase.joining:
            places = min((room - demand) / max(phase.joining_context, 1.0), self._config.max_running - running)
            places = max(places, 0.0 if running else 1.0)
            joining = min(phase.joining, places)
        concurrency = running + joining
        longest = phase.longest
        tokens, context = np.bincount(homes, alive, self._ranks), np.bincount(homes, held, self._ranks)
        decode_s = 0.0
        if concurrency:
            more = self._dealt(layout, tokens, joining)
            decodes = self._decodes(layout, tokens + more, context + more * phase.joining_context, longest)
            decode_s = self.cost.step_s(decodes)
        steps = phase.tokens / concurrency if concurrency else 0.0
        seconds, mixed, longest_s = 0.0, 0.0, 0.0
        if prompts:
            # Those that wait for their prompts to be computed do not decode yet.
            alone = self._decodes(layout, tokens, context, longest)
            beside = _Beside(alone, computes_alone(layout), concurrency, phase.answer, places, decode_s)
            for part in self._in_turn(prompts, phase.joining, beside):
                seconds += part.seconds
                mixed += part.steps
                longest_s = max(longest_s, part.longest_s)
        total = max(steps, mixed, 1e-9)
        return Time(
            seconds=(seconds + max(steps - mixed, 0.0) * decode_s) * phase.presence,
            steps=total * phase.presence,
            p99_step_s=longest_s if mixed / total > RARE else decode_s,
            concurrency=concurrency,
            held=min(demand, room) + joining * phase.joining_context,
        )

    def _in_turn(self, prompts: tuple[Prompts, ...], waiting: float, beside: _Beside) -> list[_Computed]:
        """`prompts` one after the other, and those that come as the last ones that are there; waiting: all who wait."""
        found: list[_Computed] = []
        places, tokens = beside.places, 0.0
        for some in prompts:
            if some.arriving_s and found:  # some come while the others are being computed, and wait behind them
                last = prompts[len(found) - 1]
                joined = some.joining(sum(x.seconds for x in found), tokens)
                there = _share(places + last.waiting, last.waiting + joined / some.length)
                found[-1] = self._computed(changed(last, tokens=last.tokens + joined), there, beside)
                some = changed(some, tokens=some.tokens - joined)
            at_once = _share(beside.places, waiting) if some.arriving_s else _share(places, some.waiting)
            found.append(self._computed(some, at_once, beside))
            places, tokens = places - some.waiting, tokens + some.tokens
        return found

    def _computed(self, prompts: Prompts, at_once: float, beside: _Beside) -> _Computed:
        """at_once: the share of them for which there is room."""
        most = max(self._config.max_batch_tokens - beside.concurrency, 1.0)
        seconds = steps = longest_s = 0.0
        for part in _parts(prompts, beside, at_once, most):
            part, mean_s, part_s = self._mixed(beside, part, most)
            steps += part.tokens / part.chunk
            seconds += part.tokens / part.chunk * mean_s
            longest_s = max(longest_s, part_s)
        return _Computed(seconds, steps, longest_s)

    def _mixed(self, beside: _Beside, part: _Part, most: float) -> tuple[_Part, float, float]:
        """(`part` with what a step has of it in the end, the mean time of these steps, the longest class's). What comes
        while such a step lasts is what the next one has; beyond `most`, prompts queue at more and more owners."""
        while True:
            # Long and short prompts have steps of their own, unless owners compute them side by side.
            mixed = beside.alone and part.owners > 1
            classes = ((1.0, sum(share * p for share, p in part.lengths)),) if mixed else part.lengths
            times = [self.cost.step_s(self._with_chunk(beside, part, p)) for _, p in classes]
            mean_s = sum(share * s for (share, _), s in zip(classes, times, strict=True))
            full, comes = part.chunk >= most, part.per_s * mean_s
            if comes <= 1.2 * part.chunk or full and not (beside.alone and part.owners < self._ranks):
                return part, mean_s, max(times)
            part = part.growing(comes, 2 * part.owners if full else 0.0, most)

    def _dealt(self, layout: Layout, tokens: np.ndarray, joining: float) -> np.ndarray:
        """[N] how `joining` requests are dealt to ranks where `tokens` [N] run."""
        if joining and SPECS[layout].placement is not PlacementKind.REPLICATED:
            return level(tokens, joining)
        more = np.zeros(len(tokens))
        more[0] = joining
        return more

    def _decodes(self, layout: Layout, tokens: np.ndarray, context: np.ndarray, longest: int) -> Batch:
        """A step that has one token of each request that runs: `tokens` [N], with `context` [N] rows."""
        return Batch(
            layout=layout,
            decode_tokens=tokens,
            decode_context=context,
            prefill_tokens=self._nothing,
            prefill_pairs=self._nothing,
            prefill_context=self._nothing,
            sampled=math.ceil(np.add.reduce(tokens)),
            decode_longest=longest,
        )

    def _with_chunk(self, beside: _Beside, part: _Part, prompt: float) -> Batch:
        """A step that has, besides, what `part` has of prompts of one length."""
        n, running, alone = self._ranks, beside.running, beside.alone
        replicated = SPECS[running.layout].placement is PlacementKind.REPLICATED
        ranks = 1 if replicated else min(max(round(part.owners if alone else part.chunk / prompt), 1), n)
        share = part.chunk / ranks
        run = min(share if alone else part.chunk, prompt)  # tokens that are taken from one prompt after the other
        before = prompt / 2  # of the prompt, on average
        tokens, pairs, reached = np.zeros(n), np.zeros(n), np.zeros(n)
        tokens[:ranks], pairs[:ranks] = share, share * before
        # Each chunk reaches all that comes before it: prompts side by side are cut into more of them.
        reached[:ranks] = share / run * (before + run / 2)
        if alone and ranks > 1:  # all wait for the one that is farthest in its prompt
            farthest = max(part.farthest, before)
            pairs[0], reached[0] = share * farthest, share / run * (farthest + run / 2)
        return changed(
            running, prefill_tokens=tokens, prefill_pairs=pairs, prefill_context=reached, sampled=running.sampled + 1
        )


class _Beside(msgspec.Struct, frozen=True, gc=False):
    """What prompts of a phase are computed beside, under a layout."""

    running: Batch
    """A step of the running requests for whose cache there is room."""
    alone: bool
    """Prompts are computed by their owners alone."""
    concurrency: float
    """Requests that run at once."""
    answer: float
    """Tokens of output of one that joins."""
    places: float
    """So many more than those that run have room now."""
    decode_s: float
    """A step without prompts."""


class _Computed(msgspec.Struct, frozen=True, gc=False):
    """What prompts take, decodes beside them included."""

    seconds: float
    steps: float
    longest_s: float
    """The longest of these steps."""


class _Part(msgspec.Struct, frozen=True, gc=False):
    """Tokens of prompts that are computed in the same way."""

    tokens: float
    """All of them."""
    chunk: float
    """What a step computes of them, if it does at all."""
    owners: float
    """So many share it, where each computes prompts of its own."""
    prompt: float
    """What a prompt has of them, on average, but at most what a step takes."""
    lengths: Halves
    farthest: float = 0.0
    per_s: float = 0.0
    """So many come in a second; 0: all are there."""

    def growing(self, comes: float, owners: float, most: float) -> _Part:
        """With what a step has that has any, where so many tokens come during one, by chance; owners: at least."""
        number = max(comes, 1.0) / self.prompt
        number = max(number / -math.expm1(-number), owners)
        return changed(self, chunk=min(number * self.prompt, most), owners=number)


def _parts(prompts: Prompts, beside: _Beside, at_once: float, most: float) -> list[_Part]:
    """How `prompts` are computed. at_once: the share of those that are there for which there is room now."""
    if not prompts.tokens:
        return []
    prompt = min(prompts.length, most)
    one_by_one = _Part(prompts.tokens, prompt, 1.0, prompt, prompts.lengths, per_s=prompts.arriving_s)
    if at_once == 1.0 and prompts.arriving_s:  # a step computes what came during the one before
        return [one_by_one.growing(prompts.arriving_s * beside.decode_s, 1.0, most)]
    there = 0.0 if prompts.arriving_s else prompts.tokens * at_once
    found = []
    if there:
        chunk = min(max(prompts.tokens, 1.0), most)
        found.append(_Part(there, chunk, prompts.owners, prompt, prompts.lengths, farthest=prompts.farthest))
    if at_once < 1.0:  # others have to wait until those that run end
        comes = prompts.length * beside.concurrency / beside.answer
        found.append(changed(one_by_one, tokens=prompts.tokens - there, per_s=0.0).growing(comes, 1.0, most))
    return found


def _share(places: float, waiting: float) -> float:
    """Of those that wait, who have a place."""
    return min(max(places, 0.0) / waiting, 1.0) if waiting else 1.0


def level(counts: np.ndarray, more: float) -> np.ndarray:
    """[N] how `more` requests are dealt to ranks with `counts` [N] so that the largest count is as small as can be;
    whole ones first, since half a request keeps a rank as busy as one."""
    order = counts.argsort(kind="stable")
    ranked = counts[order]
    sums = np.arange(1, len(counts) + 1) * ranked - ranked.cumsum()  # to lift those below up to each one
    full = int(sums.searchsorted(more, side="right"))  # ranks that get some
    out = np.zeros(len(counts))
    if more < full:  # fewer requests than ranks
        whole = max(int(more), 1)
        out[order[:whole]] = more / whole
    else:
        out[order[:full]] = (more + np.add.reduce(ranked[:full])) / full - ranked[:full]
    return out
