"""Estimates how long a phase of the work ahead (phases.py) would take under a layout. R running requests, N ranks."""

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

FULL = 0.97  # the share of the cache that can be used before requests preempt each other
RARE = 0.01  # steps that are rarer than this share do not change the 99th percentile


class Time(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a phase takes under one layout."""

    seconds: float
    steps: float
    p99_step_s: float
    """The 99th percentile of the steps' times: how long a running request waits for its next token."""
    concurrency: float
    """Requests that run at once."""
    held: float
    """Cache rows of all requests that run at once."""


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
        """By how many seconds background copies lengthen steps; num_bytes: sent and received by the busiest rank."""
        return self.cost.copies_s(num_bytes, self._config.layout)

    def time(self, phase: Phase, layout: Layout, homes: np.ndarray) -> Time:
        """What `phase` takes under `layout`, with the running requests at homes [R]."""
        running, demand = phase.running, phase.demand
        room = FULL * self._room[layout]
        joining, places = 0.0, math.inf  # places: there is room for so many more requests now
        prompts = phase.prompts
        if demand > room:  # some are preempted and computed again later
            again = Prompts(tokens=demand - room, lengths=((1.0, max(demand / running, 1.0)),))
            prompts = (*prompts, again)
            phase = changed(phase, alive=phase.alive * (room / demand))
            running = phase.running
        elif phase.joining:
            places = min((room - demand) / max(phase.joining_context, 1.0), self._config.max_running - running)
            places = max(places, 0.0 if running else 1.0)
            joining = min(phase.joining, places)
        concurrency = running + joining
        tokens, context = (np.bincount(homes, values, self._ranks) for values in (phase.alive, phase.held))
        decode_s = 0.0
        if concurrency:
            more = self._dealt(layout, tokens, joining)
            decodes = self._decodes(layout, tokens + more, context + more * phase.joining_context, phase.longest)
            decode_s = self.cost.step_s(decodes)
        steps = phase.tokens / concurrency if concurrency else 0.0
        # Joining requests do not decode while their prompts are being computed.
        running_now = self._decodes(layout, tokens, context, phase.longest)
        beside = _Beside(running_now, computes_alone(layout), concurrency, phase.answer, places, decode_s)
        found = self._in_turn(prompts, phase.joining, beside)
        mixed = sum([part.steps for part in found])
        total = max(steps, mixed, 1e-9)
        seconds = sum([part.seconds for part in found]) + max(steps - mixed, 0.0) * decode_s
        return Time(
            seconds=seconds * phase.presence,
            steps=total * phase.presence,
            p99_step_s=max(part.longest_s for part in found) if mixed / total > RARE else decode_s,
            concurrency=concurrency,
            held=min(demand, room) + joining * phase.joining_context,
        )

    def _in_turn(self, prompts: tuple[Prompts, ...], waiting: float, beside: _Beside) -> list[_Computed]:
        """What `prompts` take, one group after another. Arriving prompts that come meanwhile are computed together with
        the last group that is there. waiting: requests that wait, all together."""
        found: list[_Computed] = []
        places, tokens = beside.places, 0.0
        for some in prompts:
            if some.arriving_s and found:  # some arrive while the groups before are being computed, and join them
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
        """What one group of prompts takes. at_once: the share of it for which the cache has room now."""
        most = max(self._config.max_batch_tokens - beside.concurrency, 1.0)
        seconds = steps = longest_s = 0.0
        for part in _parts(prompts, beside, at_once, most):
            part, mean_s, part_s = self._mixed(beside, part, most)
            steps += part.tokens / part.chunk
            seconds += part.tokens / part.chunk * mean_s
            longest_s = max(longest_s, part_s)
        return _Computed(seconds, steps, longest_s)

    def _mixed(self, beside: _Beside, part: _Part, most: float) -> tuple[_Part, float, float]:
        """(`part` with the chunk that a step has of it in the end, the mean time of such a step, that of the longest
        class of prompts). While prompts arrive, a step's chunk is what arrived during the step before, so chunk and
        time grow until they fit. A chunk is at most `most`; beyond that, prompts queue at more and more owners."""
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
        """[N]: how many of `joining` requests go to each rank, where `tokens` [N] are running."""
        if joining and SPECS[layout].placement is not PlacementKind.REPLICATED:
            return level(tokens, joining)
        more = np.zeros(len(tokens))
        more[0] = joining
        return more

    def _decodes(self, layout: Layout, tokens: np.ndarray, context: np.ndarray, longest: int) -> Batch:
        """A step that decodes one token of each running request: `tokens` [N] by rank, with `context` [N] rows."""
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
        """A step of the running requests and of a chunk of `part`, whose prompts all have the length `prompt`."""
        n, running, alone = self._ranks, beside.running, beside.alone
        replicated = SPECS[running.layout].placement is PlacementKind.REPLICATED
        ranks = 1 if replicated else min(max(round(part.owners if alone else part.chunk / prompt), 1), n)
        share = part.chunk / ranks
        run = min(share if alone else part.chunk, prompt)  # tokens that are taken from one prompt after the other
        before = prompt / 2  # of the prompt, on average
        tokens, pairs, reached = np.zeros(n), np.zeros(n), np.zeros(n)
        tokens[:ranks], pairs[:ranks] = share, share * before
        # A chunk attends to all of its prompt before it, so prompts that are computed side by side, in more and smaller
        # chunks, reach more rows.
        reached[:ranks] = share / run * (before + run / 2)
        if alone and ranks > 1:  # all ranks wait for the one whose prompt has come farthest
            farthest = max(part.farthest, before)
            pairs[0], reached[0] = share * farthest, share / run * (farthest + run / 2)
        return changed(
            running, prefill_tokens=tokens, prefill_pairs=pairs, prefill_context=reached, sampled=running.sampled + 1
        )


class _Beside(msgspec.Struct, frozen=True, gc=False):
    """The decodes that share a phase's steps with its prompts, under one layout."""

    running: Batch
    """A step of those running requests for whose cache there is room."""
    alone: bool
    """Each prompt is computed by its owner alone."""
    concurrency: float
    """Requests that run at once."""
    answer: float
    """Output tokens of a joining request."""
    places: float
    """There is room for so many more requests now."""
    decode_s: float
    """The time of a step without prompts."""


class _Computed(msgspec.Struct, frozen=True, gc=False):
    """What it takes to compute prompts, with the decodes that share the steps."""

    seconds: float
    steps: float
    longest_s: float
    """The longest of these steps."""


class _Part(msgspec.Struct, frozen=True, gc=False):
    """Prompt tokens that are computed in the same way."""

    tokens: float
    """All of the part's tokens."""
    chunk: float
    """How many of them a step computes that computes any."""
    owners: float
    """So many owners share a step's chunk, where each computes prompts of its own."""
    prompt: float
    """A prompt's length, on average, but at most what a step takes."""
    lengths: Halves
    farthest: float = 0.0
    per_s: float = 0.0
    """Tokens that arrive in a second; 0: all are there."""

    def growing(self, comes: float, owners: float, most: float) -> _Part:
        """The part with the chunk of a step that has any of it, when `comes` tokens arrive at random during a step; for
        at least so many owners."""
        number = max(comes, 1.0) / self.prompt
        number = max(number / -math.expm1(-number), owners)
        return changed(self, chunk=min(number * self.prompt, most), owners=number)


def _parts(prompts: Prompts, beside: _Beside, at_once: float, most: float) -> list[_Part]:
    """The parts in which `prompts` are computed. at_once: the share of them for which the cache has room now."""
    if not prompts.tokens:
        return []
    prompt = min(prompts.length, most)
    one_by_one = _Part(prompts.tokens, prompt, 1.0, prompt, prompts.lengths, per_s=prompts.arriving_s)
    if at_once == 1.0 and prompts.arriving_s:  # a step computes what arrived during the step before
        return [one_by_one.growing(prompts.arriving_s * beside.decode_s, 1.0, most)]
    there = 0.0 if prompts.arriving_s else prompts.tokens * at_once
    found = []
    if there:
        chunk = min(max(prompts.tokens, 1.0), most)
        found.append(_Part(there, chunk, prompts.owners, prompt, prompts.lengths, farthest=prompts.farthest))
    if at_once < 1.0:  # the others are admitted as running requests end
        comes = prompts.length * beside.concurrency / beside.answer
        found.append(changed(one_by_one, tokens=prompts.tokens - there, per_s=0.0).growing(comes, 1.0, most))
    return found


def _share(places: float, waiting: float) -> float:
    """The share of `waiting` requests that find a place."""
    return min(max(places, 0.0) / waiting, 1.0) if waiting else 1.0


def level(counts: np.ndarray, more: float) -> np.ndarray:
    """[N]: how many of `more` requests go to each rank, so that the largest of counts [N] plus these is as small as can
    be. Fewer requests than ranks are not cut into fractions: half a request keeps a rank as busy as a whole one."""
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
