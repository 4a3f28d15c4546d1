"""Cuts the work ahead into phases in which the batch hardly changes.

The first phase has the prompts that are known and the queue behind the running requests. In the later ones the running
requests decode on, and fewer and fewer are left. Requests that keep arriving are a part of every phase. R running
requests, N ranks.
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
CUTS = 2  # how often the queue is cut in two: into up to four parts
OTHERS = 2.0  # it is cut only between parts whose prompt lengths differ by at least this factor,
LEAST = 0.1  # and into parts with at least this share of the tokens: smaller ones change little, and may be chance
PLACES = 64  # points of the longest prompt at which a distribution is evaluated


class Prompts(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Prompts to be computed in a phase."""

    tokens: float
    """To be computed, of all prompts."""
    lengths: Halves
    """Lengths of the prompts that the tokens belong to."""
    owners: float = 1.0
    """The number of owners that would take as long if they shared the tokens evenly: 1 for a single prompt."""
    waiting: float = 0.0
    """How many of the prompts are those of waiting requests."""
    farthest: float = 0.0
    """When each owner computes a prompt of its own: how far into its prompt the one that is farthest is, on average."""
    arriving_s: float = 0.0
    """For prompts that are yet to arrive: tokens per second; 0: they are there."""

    @cached_property
    def length(self) -> float:
        """Average length of a prompt."""
        return 1 / sum(share / length for share, length in self.lengths)

    def joining(self, seconds: float, tokens: float) -> float:
        """For arriving prompts: how many of their tokens are computed together with other prompts, which take `seconds`
        for `tokens` tokens. These are the tokens that arrive meanwhile, and while those are computed, and so on: a
        queue's busy period."""
        come = self.arriving_s * seconds
        return self.tokens if come >= tokens else min(self.tokens, come / (1 - come / tokens))


class Phase(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A stretch of work, the same for all layouts. Requests are counted in fractions, as they end by chance."""

    alive: np.ndarray
    """[R]: the chance that each running request is still there half way through the phase."""
    context: np.ndarray
    """[R]: cache rows of each running request half way through the phase."""
    joining: float
    """How many further requests take part, where the cache has room for them."""
    joining_context: float
    """Cache rows of a joining request, about half way through its life."""
    answer: float
    """Output tokens of a joining request."""
    tokens: float
    """Output tokens that all requests generate in the phase."""
    prompts: tuple[Prompts, ...]
    """In the order in which they are computed."""
    presence: float = 1.0
    """The chance that there is anything to do at all."""
    ends: float = 0.0
    """The chance that all of the work ends in this phase."""

    @cached_property
    def held(self) -> np.ndarray:
        """[R]: expected cache rows of each running request."""
        return self.alive * self.context

    @cached_property
    def running(self) -> float:
        """How many of the running requests are still there."""
        return float(self.alive.sum())

    @cached_property
    def demand(self) -> float:
        """Cache rows of all running requests together."""
        return float(self.held.sum())

    @cached_property
    def longest(self) -> int:
        """Cache rows of the longest running request."""
        return int(self.context.max(initial=0.0))


class _Coming:
    """Requests that will arrive during the phases, one phase after another; all together not more than
    arriving.most_tokens."""

    def __init__(self, arriving: Arriving, step_s: float) -> None:
        self._arriving = arriving
        self._step_s = step_s
        self._left = arriving.most_tokens

    @property
    def steps(self) -> float:
        """For how many steps requests will still arrive."""
        return self._left / max(self._arriving.tokens_s * self._step_s, 1e-9)

    def running(self, answer: float, after: float, steps: float) -> float:
        """How many of the requests that arrive during the next `steps` steps are running after `after` steps, where a
        request generates `answer` tokens on average. At first none, in the end as many as arrive during the life of one
        (Little's law)."""
        share = math.exp(-max(after - steps, 0.0) / answer) - math.exp(-after / answer)
        return self._arriving.per_s * self._step_s * answer * share

    def during(self, steps: float) -> tuple[Prompts, ...]:
        """The prompts that arrive during so many steps."""
        tokens = min(self._arriving.tokens_s * self._step_s * steps, self._left)
        self._left -= tokens
        coming = Prompts(tokens=tokens, lengths=self._arriving.prompts, arriving_s=self._arriving.tokens_s)
        return (coming,) if tokens else ()


def phases_of(load: Load, step_s: float) -> list[Phase]:
    """The phases ahead. step_s: how long a step takes now, which says how many requests arrive during so many steps."""
    coming = _Coming(load.arriving, step_s)
    found = [_prompts_first(load, coming)] if load.prompt_tokens else []
    return found + _decoding(load, coming) if load.running else found


def _prompts_first(load: Load, coming: _Coming) -> Phase:
    """The first phase: the prompts that are known, and the output of waiting requests."""
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
    """Prompts of lengths `prompts` [P], which are computed together; so many of them are waiting requests'."""
    ranked, owners = np.sort(prompts), _owners(prompts, num_ranks)
    return Prompts(
        tokens=float(prompts.sum()),
        lengths=halves(ranked, ranked**2),
        owners=owners,
        waiting=waiting,
        farthest=_farthest(prompts, round(owners)),
    )


def _in_turn(prompts: np.ndarray, num_ranks: int, cuts: int) -> list[np.ndarray]:
    """Cuts `prompts` [P], in their order, where the lengths before and after the cut differ most, and then each part
    again, `cuts` deep.

    The difference is measured as the squared difference of logarithmic lengths times the tokens of both sides. A part
    must have enough prompts to keep all owners busy: a smaller one would be computed along with its neighbours.
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
    """The phases after the prompts: running requests decode on, and fewer and fewer are left."""
    found: list[Phase] = []
    context = load.held + load.prefill
    left, life = np.maximum(load.left, 1.0), float(load.left.mean())
    prompt = float((context - load.generated).mean())
    answer, come = max(load.waiting_left, 1.0), coming.steps
    going = [
        min(float(np.exp(-x * life / left).sum()) + coming.running(answer, x * life, come), 1.0) for x in LIVES[:-1]
    ]
    # Once no request is left, this work has ended: requests that come later are other work.
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
    """The number of owners that would take as long for `prompts` [P] if they shared the tokens evenly. A prompt of more
    than an even share occupies one owner, alone, after the short prompts are done by all."""
    total = float(prompts.sum())
    long = prompts > total / num_ranks
    longer = float(prompts[long].sum())
    busiest = (total - longer) / num_ranks + (longer / min(int(long.sum()), num_ranks) if longer else 0.0)
    return total / busiest


def _farthest(prompts: np.ndarray, owners: int) -> float:
    """The average of a maximum: draw a token from all tokens of `prompts` [P], `owners` times, and take the largest
    position that one of them has in its prompt."""
    ranked = np.sort(prompts)
    places = np.arange(PLACES + 1) * (ranked[-1] / PLACES)
    shorter = ranked.searchsorted(places, side="right")
    # Tokens at a place or before it: the shorter prompts whole, and so many of each other one.
    before = np.append(0.0, np.cumsum(ranked))[shorter] + places * (len(ranked) - shorter)
    beyond = 1 - (before / before[-1]) ** owners
    return float(((beyond[1:] + beyond[:-1]) / 2).sum() * places[1])


def homes_under(layout: Layout, load: Load) -> np.ndarray:
    """[R]: owners or homes that the running requests would have under `layout`. They keep those they have; requests
    that have none are dealt out to the ranks, the largest first, back and forth."""
    if SPECS[layout].placement is PlacementKind.REPLICATED:
        return np.zeros(load.running, np.int64)
    if SPECS[load.layout].placement is not PlacementKind.REPLICATED:
        return load.home
    n = load.num_ranks
    homes = np.empty(load.running, np.int64)
    turn = np.arange(load.running) % (2 * n)
    homes[np.argsort(-load.held, kind="stable")] = np.where(turn < n, turn, 2 * n - 1 - turn)
    return homes
