"""Deployments and loads, by number, for perf/policy.py and the tests."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from splash_trt.config import DEFAULTS, EngineConfig, Formats, Layout
from splash_trt.memory.map import capacity
from splash_trt.models.config import ModelConfig
from splash_trt.orchestrator import cost_policy
from splash_trt.scheduler.compare import Objective
from splash_trt.scheduler.cost_model import CostModel
from splash_trt.scheduler.device import Device
from splash_trt.scheduler.devices import BUILT_IN
from splash_trt.scheduler.policy import CostPolicy
from splash_trt.simulate.adversary import Adversary
from splash_trt.simulate.compare import Comparison, compare, configs
from splash_trt.simulate.generators import make, random_trace
from splash_trt.simulate.outcome import AUTO, CEILING, Outcome
from splash_trt.simulate.run import ceiling, longest_request, simulate
from splash_trt.simulate.source import TraceSource
from splash_trt.simulate.traces import Trace
from tests.oracles.published_configs import GLM_5, V3, V32, parse

FIXED = tuple(layout.name.lower() for layout in Layout)
LABELS = (*FIXED, AUTO, CEILING)
MEMORY_SHARE = 0.9
MAX_BATCH_TOKENS = 16384
MAX_RUNNING = 2048
MIGRATION = {field: value for field, value in DEFAULTS["gpu"].items() if field.startswith("migration_")}
"""What a server on GPUs gives a switch."""
PHASES = (3, 6)  # how many phases a random load has: at least, and less than
CROWD_TOKENS = 1_500_000
"""Half of the cache that the largest crowds want: more than TP's holds, less than DP's. Crowds beyond DP's cache would
take hours to simulate; `published` and `regimes` show what the cache decides."""
OPEN_EVERY = 5  # one random load in so many has open arrivals


@dataclass(frozen=True)
class Deployment:
    """A published model on 8 devices; weights, except attention's, and the cache in FP8."""

    model_name: str
    device_name: str
    attention: str
    """The format of attention's head-cut weights, which TP and DOP split over ranks and DP and CP need whole."""

    @property
    def model(self) -> ModelConfig:
        return parse({"deepseek-v3.2": V32, "deepseek-v3": V3, "glm-5": GLM_5}[self.model_name])

    @property
    def device(self) -> Device:
        return BUILT_IN[self.device_name]

    @property
    def base(self) -> EngineConfig:
        return EngineConfig(
            num_ranks=8,
            dtype="bfloat16",
            formats=Formats(weights="fp8", attention=self.attention, cache="fp8"),
            memory_bytes=int(self.device.memory_bytes * MEMORY_SHARE),
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_running=MAX_RUNNING,
            **MIGRATION,
        )

    def __str__(self) -> str:
        return f"{self.model_name}, 8 x {self.device_name}, attention {self.attention}"

    def room(self) -> dict[str, int]:
        """How many distinct tokens the cache holds in each layout, if the deployment serves this layout only."""
        alone = {layout: dataclasses.replace(self.base, layout=layout, layouts=()) for layout in Layout}
        return {layout.name.lower(): capacity(self.model, c, layout).total_tokens for layout, c in alone.items()}

    def policy(self, config: EngineConfig) -> CostPolicy:
        return cost_policy(self.model, config, self.device, Objective())

    def fitting(self, load: Trace) -> Trace:
        """The load with requests cut to what the layout with the least room can take."""
        deployments = configs(self.base, (AUTO, *FIXED)).values()
        return load.clipped(min(longest_request(self.model, config) for config in deployments))[0]

    def outcome(self, load: Trace, label: str) -> Outcome:
        """Simulates `load` under a fixed layout, AUTO or CEILING."""
        config = configs(self.base, (AUTO, *FIXED))[AUTO if label == CEILING else label]
        cost, source = CostModel(self.model, config, self.device), TraceSource(load)
        if label == CEILING:
            return ceiling(self.model, config, cost, source)
        policy = self.policy(config) if label == AUTO else None
        return simulate(self.model, config, cost, source, label=label, policy=policy)

    def compare(self, load: Trace | Adversary) -> Comparison:
        """Simulates `load` under all labels."""
        cost = CostModel(self.model, self.base, self.device)
        return compare(self.model, self.base, cost, load, (AUTO, *FIXED), self.policy)


DEPLOYMENTS = (
    Deployment("deepseek-v3.2", "h200", "fp8"),
    Deployment("glm-5", "b200", "fp8"),
    Deployment("deepseek-v3.2", "h200", "bfloat16"),
    Deployment("glm-5", "b200", "bfloat16"),
    Deployment("deepseek-v3", "h200", "fp8"),
)
"""The last one's model has no indexer: every token reads its whole context."""
SPARSE = 4  # random loads take the first so many in turn


def deployment(kind: str, number: int) -> Deployment:
    """The deployment of a case: by seed for random loads and adversaries, by index for the kinds in KINDS."""
    return DEPLOYMENTS[number if kind in KINDS else number % SPARSE]


KINDS = {
    "rollouts": "rollouts:prompts=128,samples=16",
    "agents": "agents:sessions=512",
    "reasoning": "reasoning:requests=1024,rate=8",
}
"""The kinds of load that figures were published for, with enough requests to fill 8 devices, and with the generators'
default lengths."""


def load_of(kind: str, number: int, size: float) -> Trace | Adversary:
    """The load of a case. size: scales its counts, for random loads and adversaries only."""
    where = deployment(kind, number)
    if kind == "adversary":
        return adversary(number, size)
    if kind == "random":
        return where.fitting(random_load(number, size))
    made = make(KINDS[kind], seed=1)
    assert isinstance(made, Trace)
    return where.fitting(made)


def random_load(seed: int, size: float = 1.0) -> Trace:
    """A load as by `splash-trt simulate --trace random`, with so many phases that it lasts minutes; every OPEN_EVERY-th
    has open arrivals instead. size: scales all counts."""
    rng = np.random.default_rng(seed)
    if is_open(seed):
        return open_arrivals(rng, size)
    return random_trace(rng, phases=int(rng.integers(*PHASES)), size=size, room_tokens=CROWD_TOKENS)


def is_open(seed: int) -> bool:
    return seed % OPEN_EVERY == 0


PERIOD_S = 60.0


def open_arrivals(rng: np.random.Generator, size: float = 1.0) -> Trace:
    """Two to four periods of a minute, each with its own rate of arrivals (a Poisson process, 0.2 to 20 a second) and
    its own log-normal lengths, with medians of 256 to 16,384 tokens for prompts and 100 to 800 for answers."""

    def median(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    arrival, prompt, output, notes, begin = [], [], [], [], 0.0
    for _ in range(int(rng.integers(2, 5))):
        rate, prompt_median, output_median = median(0.2, 20), median(256, 16384), median(100, 800)
        count = max(1, int(rng.poisson(rate * PERIOD_S * size)))
        arrival.append(begin + np.sort(rng.uniform(0, PERIOD_S * size, count)))
        prompt.append(np.maximum(1, np.rint(prompt_median * np.exp(rng.normal(0, 0.6, count)))))
        output.append(np.maximum(1, np.rint(output_median * np.exp(rng.normal(0, 0.6, count)))))
        notes.append(f"{rate:.1f}/s of {prompt_median:.0f} + {output_median:.0f}")
        begin += PERIOD_S * size
    columns = (np.concatenate(column) for column in (arrival, prompt, output))
    return Trace.open("open", *columns, notes=(f"open: {', '.join(notes)}",))


def adversary(seed: int, size: float = 1.0) -> Adversary:
    """An adversary, which alternates between few clients and many."""
    return Adversary(seed, **adversary_numbers(seed, size))


def adversary_numbers(seed: int, size: float) -> dict[str, int]:
    """How many clients an adversary has, and how long their requests are. size: scales the number of requests."""
    rng = np.random.default_rng(1000 + seed)
    return {
        "requests": max(64, round(size * 4000)),
        "few": int(rng.integers(1, 5)),
        "many": int(rng.choice([128, 256, 512, 1024])),
        "prompt_tokens": int(rng.choice([256, 1024, 4096])),
        "long_output": int(rng.integers(500, 2000)),
        "short_output": int(rng.integers(100, 300)),
    }
