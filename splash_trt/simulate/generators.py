"""Random loads of typical uses of a server, each described by a few numbers. `make` reads "name:key=value,…".

Lengths are log-normal: `…_tokens` and `output_median` are medians, `…_sigma` is the logarithm's standard deviation.
Every number can be set, and is listed in the trace's notes.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from splash_trt.simulate.adversary import Adversary
from splash_trt.simulate.traces import NOT_AFTER, PREFIX_NOTE, Trace, joined

Generator = np.random.Generator


def rollouts(
    rng: Generator,
    *,
    prompts: int = 64,
    samples: int = 16,
    prompt_tokens: int = 512,
    prompt_sigma: float = 0.3,
    output_median: int = 2000,
    output_sigma: float = 0.9,
    output_max: int = 32768,
    waves: int = 1,
) -> Trace:
    """Reinforcement learning: in each wave, prompts x samples answers are requested at once, and all must end before
    the next wave begins. The longest answers decide how long it takes."""
    parts = []
    for _ in range(waves):
        prompt = np.repeat(_lengths(rng, prompts, prompt_tokens, prompt_sigma), samples)
        output = _lengths(rng, prompts * samples, output_median, output_sigma, most=output_max)
        parts.append(Trace.open("rollouts", np.zeros(len(prompt)), prompt, output))
    return joined("rollouts", parts, in_turn=True)


def agents(
    rng: Generator,
    *,
    sessions: int = 64,
    turns: int = 8,
    system_tokens: int = 2000,
    turn_tokens: int = 600,
    turn_sigma: float = 0.8,
    output_median: int = 250,
    output_sigma: float = 0.7,
    output_max: int = 8192,
    pause_s: float = 3.0,
    start_s: float = 60.0,
) -> Trace:
    """Agents: each turn's prompt is all that was said before and what a tool has answered, for which there is a pause
    of pause_s on average. Sessions begin at random times within start_s; all share the first system_tokens."""
    said = _lengths(rng, sessions * turns, turn_tokens, turn_sigma).reshape(sessions, turns)
    output = _lengths(rng, sessions * turns, output_median, output_sigma, most=output_max).reshape(sessions, turns)
    before = np.cumsum(said + output, axis=1) - said - output
    arrival = rng.exponential(pause_s, (sessions, turns))
    arrival[:, 0] = np.sort(rng.uniform(0, start_s, sessions))
    number = np.arange(sessions * turns).reshape(turns, sessions).T  # turn by turn: a request comes after its `after`
    after = np.where(np.arange(turns) > 0, number - sessions, NOT_AFTER)
    prompt = system_tokens + before + said
    again = 1 - (said.sum() + system_tokens) / prompt.sum()
    notes = (f"{again:.0%} of the prompt tokens were seen before (earlier turns, shared beginnings)", PREFIX_NOTE)
    columns = (column.T.reshape(-1) for column in (arrival, prompt, output))
    return Trace.open("agents", *columns, after=after.T.reshape(-1), notes=notes)


def reasoning(
    rng: Generator,
    *,
    requests: int = 256,
    prompt_tokens: int = 256,
    prompt_sigma: float = 0.6,
    output_median: int = 4000,
    output_sigma: float = 0.6,
    output_max: int = 32768,
    clients: int = 0,
    rate: float = 1.0,
) -> Trace:
    """Short questions with long chains of thought: `rate` per second (a Poisson process), or, if `clients` is given,
    from that many clients, each of which sends the next one when its last has ended."""
    prompt = _lengths(rng, requests, prompt_tokens, prompt_sigma)
    output = _lengths(rng, requests, output_median, output_sigma, most=output_max)
    if clients:
        return _clients("reasoning", prompt, output, clients)
    return Trace.open("reasoning", np.cumsum(rng.exponential(1 / rate, requests)), prompt, output)


def prompts(
    rng: Generator,
    *,
    requests: int = 32,
    prompt_tokens: int = 32768,
    prompt_sigma: float = 0.4,
    output_median: int = 32,
    output_sigma: float = 0.5,
    clients: int = 1,
) -> Trace:
    """Long documents and short answers, from few clients."""
    prompt = _lengths(rng, requests, prompt_tokens, prompt_sigma)
    return _clients("prompts", prompt, _lengths(rng, requests, output_median, output_sigma), clients)


def random_trace(rng: Generator, *, phases: int = 0, size: float = 1.0, room_tokens: int = 2_000_000) -> Trace:
    """A sequence of phases (0: one to four, at random), each of which begins when the one before has ended. There are
    five kinds: few clients, a crowd, long prompts, a crowd with more context than the cache holds (full), and two of
    the first three at the same time (mixed).

    One kind, chosen at random, has most of the phases, so that each layout is the best for some seeds. size: a factor
    for all counts. room_tokens: what DP's cache holds; "full" needs about twice as much in the end.
    """
    kinds = ("few", "crowd", "prompts", "full", "mixed")
    favourite = kinds[rng.integers(len(kinds))]
    parts = []
    for _ in range(phases or int(rng.integers(1, 5))):
        kind = favourite if rng.random() < 0.65 else kinds[rng.integers(len(kinds))]
        if kind == "mixed":
            pair = rng.choice(["few", "crowd", "prompts"], 2, replace=False)
            parts.append(joined("mixed", [_phase(rng, str(k), size, room_tokens) for k in pair], in_turn=False))
        else:
            parts.append(_phase(rng, kind, size, room_tokens))
    names = ", ".join(part.name for part in parts)
    return dataclasses.replace(joined("random", parts, in_turn=True), notes=(f"phases: {names}",))


def _phase(rng: Generator, kind: str, size: float, room_tokens: int) -> Trace:
    def count(low: int, high: int) -> int:
        return max(1, round(size * np.exp(rng.uniform(np.log(low), np.log(high)))))

    if kind == "few":
        clients = int(rng.integers(1, 5))
        median = count(300, 1500)
        part = reasoning(rng, requests=clients * 3, output_median=median, output_sigma=0.3, clients=clients)
    elif kind == "crowd":
        many, median = count(32, 128), count(300, 1200)
        part = rollouts(rng, prompts=many, samples=8, prompt_tokens=256, output_median=median, output_sigma=0.4)
    elif kind == "prompts":
        part = prompts(rng, requests=count(4, 16), prompt_tokens=int(rng.integers(16_000, 64_000)))
    else:  # mostly output, so that the cache's size decides, and not how fast prompts are computed
        context = int(rng.integers(1500, 3000))
        many = max(8, round(size * 2 * room_tokens / context))
        prompt = context // 4
        part = rollouts(
            rng, prompts=many, samples=1, prompt_tokens=prompt, output_median=context - prompt, output_sigma=0.3
        )
    return dataclasses.replace(part, name=kind)


def _clients(name: str, prompt: np.ndarray, output: np.ndarray, clients: int) -> Trace:
    """A closed loop: client c sends requests c, c + clients, …, each when the one before has ended."""
    number = np.arange(len(prompt))
    after = np.where(number >= clients, number - clients, NOT_AFTER)
    return Trace.open(name, np.zeros(len(prompt)), prompt, output, after=after)


def _lengths(
    rng: Generator, count: int, median: float, sigma: float, *, most: float = float(1 << 30)
) -> np.ndarray:
    """[count] int64, log-normal, from 1 to `most`."""
    with np.errstate(over="ignore"):  # what overflows becomes `most`
        return np.clip(np.rint(median * np.exp(rng.normal(0, sigma, count))), 1, most).astype(np.int64)


GENERATORS: Mapping[str, Callable[..., Trace]] = MappingProxyType(
    {"rollouts": rollouts, "agents": agents, "reasoning": reasoning, "prompts": prompts, "random": random_trace}
)
ADVERSARY = "adversary"


def names() -> tuple[str, ...]:
    """The names that a load's description may begin with."""
    return (*GENERATORS, ADVERSARY)


def make(text: str, seed: int) -> Trace | Adversary:
    """The load that "name:key=value,…" describes; ValueError names the key, its value and what is allowed."""
    name, _, rest = text.partition(":")
    assert name in names(), name
    made: Callable[..., Trace] | type[Adversary] = Adversary if name == ADVERSARY else GENERATORS[name]
    allowed = {p.name: p.default for p in inspect.signature(made).parameters.values() if p.kind is p.KEYWORD_ONLY}
    values: dict[str, int | float] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in allowed:
            raise ValueError(f"trace: {name} has no {key!r}; it has {', '.join(allowed)}")
        values[key] = _number(f"trace: {name}: {key}", value, allowed[key], key)
    _check_count(name, {**allowed, **values})
    if name == ADVERSARY:
        return Adversary(seed, **{key: int(value) for key, value in values.items()})
    trace = GENERATORS[name](np.random.default_rng(seed), **values)
    shown = ", ".join(f"{key}={values.get(key, default):g}" for key, default in allowed.items())
    return dataclasses.replace(trace, notes=(f"{name}: {shown}, seed={seed}", *trace.notes))


COUNTS = {
    "rollouts": ("prompts", "samples", "waves"),
    "agents": ("sessions", "turns"),
    "random": ("phases", "size"),
}
"""The keys whose product is the number of requests (for random: in thousands), if that is not the key `requests`."""


def counts(name: str) -> tuple[str, ...]:
    """The keys whose product is a load's number of requests."""
    return COUNTS.get(name, ("requests",))


def _check_count(name: str, values: Mapping[str, int | float]) -> None:
    """Raises ValueError for a load that is too large for memory, before it is made."""
    asked = math.prod(max(1, values[key]) for key in counts(name)) * (1000 if name == "random" else 1)
    if asked > MOST:
        keys = " or ".join(counts(name))
        raise ValueError(f"trace: {name}: about {asked:.3g} requests are above {MOST}; lower {keys}")


ZERO_ALLOWED = ("clients", "phases", "pause_s", "start_s", "system_tokens")
MOST = 10_000_000


def _number(where: str, text: str, default: int | float, key: str) -> int | float:
    whole = isinstance(default, int)
    kind = "whole number" if whole else "number"
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        raise ValueError(f"{where}: {text!r} is not a {kind}") from None
    least: float = 0 if key in ZERO_ALLOWED or key.endswith("sigma") else 1 if whole else 1e-9
    if not least <= value <= MOST:
        raise ValueError(f"{where}: {text} is not a {kind} from {least:g} to {MOST}")
    return value
