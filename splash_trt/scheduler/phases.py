"""The work ahead, cut into phases in which the batch hardly changes.

First the prompts that are known and the queue behind the running requests; then what runs decodes on, fewer and fewer.
Requests that keep arriving are a part of every phase. R running requests, N ranks.
"""

from __future__ import annotations

import math
from functools import cached_property

import msgspec
import numpy as np

from splash_trt.config import Layout
from splash_trt.layout.spec import SPECS, PlacementKind
from splash_trt.scheduler.forecast import Arriving, Halves, halves
from splash_trt.scheduler.load import Load

LIVES = (0.0, 0.4, 1.5, 4.0)  # bounds of the decoding phases, in mean remaining lives of the running requests
CUTS = 2  # of the queue, and of each part: up to four parts
OTHERS = 2.0  # lengths of prompts that differ by less are not told apart by their order
LEAST = 0.1  # of the tokens: a smaller part would change little, and may be chance
PLACES = 64  # in the longest prompt


class Prompts(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Prompts to be computed in a phase."""

    tokens: float
    lengths: Halves
    """Of those that the tokens belong to."""
    owners: float = 1.0
    """So many owners share the tokens evenly, in effect: one prompt has one."""
    waiting: float = 0.0
    """So many requests wait for room with them."""
    farthest: float = 0.0
    """How far into its prompt the one of them is that is farthest, on average, when each computes one of its own."""
    arriving_s: float = 0.0
    """Tokens per second, where they are yet to come; 0: they are there."""

    @cached_property
    def length(self) -> float:
        """Of a prompt, on average."""
        return 1 / sum(share / length for share, length in self.lengths)

    def joining(self, seconds: float, tokens: float) -> float:
        """So many of them come while others, which take so many seconds for so many tokens, are being computed, and
        are computed as these are: a queue's busy period."""
        come = self.arriving_s * seconds
        return self.tokens if come >= tokens else min(self.tokens, come / (1 - come / tokens))


class Phase(msgspec.Struct, frozen=True, kw_only=True, dict=True):
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
    prompts: tuple[Prompts, ...]
    """In the order in which they are computed."""
    presence: float = 1.0
    """The chance that there is anything to do at all."""
    ends: float = 0.0
    """The chance that all of the work ends in this phase."""

    @cached_property
    def held(self) -> np.ndarray:
        """[R]: cache rows of each running request that takes part."""
        return self.alive * self.context

    @cached_property
    def running(self) -> float:
        """So many of them take part."""
        return float(self.alive.sum())

    @cached_property
    def demand(self) -> float:
        """Cache rows of all of them."""
        return float(self.held.sum())

    @cached_property
    def longest(self) -> int:
        """The most cache rows of one of them."""
        return int(self.context.max(initial=0.0))


class _Coming:
    """Prompts that will come, in phases one after the other: no more in all than `arriving` is taken to last for."""

    def __init__(self, arriving: Arriving, step_s: float) -> None:
        self._arriving = arriving
        self._step_s = step_s
        self._left = arriving.most_tokens

    @property
    def steps(self) -> float:
        """For so many steps they will still come."""
        return self._left / max(self._arriving.tokens_s * self._step_s, 1e-9)

    def running(self, answer: float, after: float, steps: float) -> float:
        """So many of those who come from now on, for `steps` steps, run after `after` steps, where a request makes
        `answer` tokens on average: in the end as many as come during a life (Little's law), at first none."""
        share = math.exp(-max(after - steps, 0.0) / answer) - math.exp(-after / answer)
        return self._arriving.per_s * self._step_s * answer * share

    def during(self, steps: float) -> tuple[Prompts, ...]:
        """Those of so many steps."""
        tokens = min(self._arriving.tokens_s * self._step_s * steps, self._left)
        self._left -= tokens
        coming = Prompts(tokens=tokens, lengths=self._arriving.prompts, arriving_s=self._arriving.tokens_s)
        return (coming,) if tokens else ()


def phases_of(load: Load, step_s: float) -> list[Phase]:
    """What is ahead. step_s: what a step takes now, which tells how many requests arrive meanwhile."""
    coming = _Coming(load.arriving, step_s)
    found = [_prompts_first(load, coming)] if load.prompt_tokens else []
    return found + _decoding(load, coming) if load.running else found


def _prompts_first(load: Load, coming: _Coming) -> Phase:
    """The prompts that are known, and the output of those that wait."""
    prompts = np.concatenate([load.prefill[load.prefill > 0], load.waiting_prompts]).astype(np.float64)
    groups = _in_turn(prompts, load.num_ranks, CUTS)
    begun, ends = len(prompts) - load.waiting, np.cumsum([len(group) for group in groups])
    waiting = np.diff(np.maximum(ends - begun, 0), prepend=0)
    there = [_there(group, float(some), load.num_ranks) for group, some in zip(groups, waiting, strict=True)]
    tokens = load.waiting * load.waiting_left
    return Phase(
        alive=np.ones(load.running),
        context=(load.held + load.prefill).astype(np.float64),
        joining=load.waiting,
        joining_context=load.waiting_tokens / max(load.waiting, 1) + load.waiting_left / 2,
        answer=max(load.waiting_left, 1.0),
        tokens=tokens,
        prompts=(*there, *coming.during(tokens / max(load.running + load.waiting, 1))),
        ends=0.0 if load.running else 1.0,
    )


def _there(prompts: np.ndarray, waiting: float, num_ranks: int) -> Prompts:
    """Of `prompts` [P], which are computed together; so many of them wait."""
    ranked, owners = np.sort(prompts), _owners(prompts, num_ranks)
    return Prompts(
        tokens=float(prompts.sum()),
        lengths=halves(ranked, ranked**2),
        owners=owners,
        waiting=waiting,
        farthest=_farthest(prompts, round(owners)),
    )


def _in_turn(prompts: np.ndarray, num_ranks: int, cuts: int) -> list[np.ndarray]:
    """`prompts` [P] in their order, cut where lengths before and behind differ most, and each part again, `cuts` deep.

    Differ most: in logarithmic length, squared, by the tokens of both. A part has enough to keep all owners busy: less
    is computed beside what is before and behind it.
    """
    tokens, squares = np.cumsum(prompts), np.cumsum(prompts**2)
    before, behind = tokens[:-1], tokens[-1] - tokens[:-1]
    most = np.maximum.accumulate(prompts)[:-1], np.maximum.accumulate(prompts[::-1])[::-1][1:]
    whole = (num_ranks * most[0] <= before) & (num_ranks * most[1] <= behind)
    whole &= np.minimum(before, behind) >= LEAST * tokens[-1]
    if not cuts or not whole.any():
        return [prompts]
    length = squares[:-1] / before, (squares[-1] - squares[:-1]) / behind
    differ = np.where(whole, before * behind * np.log(length[0] / length[1]) ** 2, -1.0)
    cut = int(differ.argmax())
    if abs(np.log(length[0][cut] / length[1][cut])) < np.log(OTHERS):
        return [prompts]
    parts = prompts[: cut + 1], prompts[cut + 1 :]
    return [group for part in parts for group in _in_turn(part, num_ranks, cuts - 1)]


def _decoding(load: Load, coming: _Coming) -> list[Phase]:
    """What runs decodes on, fewer and fewer."""
    found: list[Phase] = []
    context = load.held + load.prefill
    left, life = np.maximum(load.left, 1.0), float(load.left.mean())
    prompt = float((context - load.generated).mean())
    answer, come = max(load.waiting_left, 1.0), coming.steps
    going = [
        min(float(np.exp(-x * life / left).sum()) + coming.running(answer, x * life, come), 1.0) for x in LIVES[:-1]
    ]
    # Work that has ended does not go on with those who come later: that is other work.
    ends = -np.diff([*np.minimum.accumulate(going), 0.0])
    for begin, end, ending in zip(LIVES[:-1], LIVES[1:], ends.tolist(), strict=True):
        steps, middle = (end - begin) * life, (begin + end) / 2 * life
        alive = np.exp(-middle / left)
        expected, newcomers = float(alive.sum()), coming.running(answer, middle, come)
        found.append(
            Phase(
                alive=alive / min(expected, 1.0),
                context=context + middle,
                joining=newcomers,
                joining_context=prompt + load.waiting_left / 2,
                answer=answer,
                tokens=steps * (max(expected, 1.0) + newcomers),
                prompts=coming.during(steps),
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
    places = np.arange(PLACES + 1) * (ranked[-1] / PLACES)
    shorter = ranked.searchsorted(places, side="right")
    # Tokens at a place or before it: the shorter prompts whole, and so many of each other one.
    before = np.append(0.0, np.cumsum(ranked))[shorter] + places * (len(ranked) - shorter)
    beyond = 1 - (before / before[-1]) ** owners
    return float(((beyond[1:] + beyond[:-1]) / 2).sum() * places[1])


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
