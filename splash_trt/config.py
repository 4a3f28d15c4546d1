"""A deployment's configuration, validated, and the names of the four attention layouts."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Layout(enum.IntEnum):
    """How attention runs in a step (see layout/spec.py). An integer, so that it fits into a plan as it is."""

    TP = 0
    DP = 1
    CP = 2
    DOP = 3

    __hash__ = int.__hash__  # Enum's own takes several times as long, and layouts are dict keys in every step

    @classmethod
    def parse(cls, name: str) -> Layout:
        """The layout called `name` ("tp", "dp", "cp" or "dop", in any case); ValueError for any other."""
        try:
            return cls[name.upper()]
        except (KeyError, AttributeError):  # unknown, or no text
            raise ValueError(f"layout: {name!r} is not one of tp, dp, cp, dop") from None


DTYPES = ("float64", "float32", "bfloat16")
PLAN_DTYPES = ("float32", "bfloat16")  # that TensorRT's networks are built in
RUN_ON = ("cpu", "gpu")
RUN_ON_PLACES = (*RUN_ON, "shared-gpu")  # what ranks are started on
RUN_ON_WISHES = ("auto", *RUN_ON_PLACES)  # of which splash_trt/dist/place.py makes one of RUN_ON
SIMULATED_ROUTING = ("", "uniform")
OPERATORS = ("auto", "own")
EXPERTS_CUTS = ("whole", "inside")
FORMATS = (*DTYPES, "fp8")
FORMAT_ALIASES = {"bf16": "bfloat16"}


def format_of(name: str) -> str:
    """One of FORMATS, by what a user calls it; what is none stays as it is."""
    return FORMAT_ALIASES.get(name, name)


@dataclass(frozen=True, kw_only=True)
class Formats:
    """The formats in which numbers are stored: names of FORMATS, or None for EngineConfig.dtype.

    "fp8" weights have one float32 scale for each 128 x 128 block. An "fp8" cache row has one float32 scale for each 128
    numbers of its latent part and of its indexer key, and its rope part in bfloat16, as DeepSeek published it.
    """

    weights: str | None = None
    """All weight matrices except attention's head-cut ones: experts, MLPs, q_a, kv_a, indexer."""
    attention: str | None = None
    """Attention's head-cut matrices, which switches move: q_b, W_UK, W_UV, o."""
    cache: str | None = None

    def __post_init__(self) -> None:
        for field in ("weights", "attention", "cache"):
            value = getattr(self, field)
            known = None if value is None else format_of(value)
            if known not in (None, *FORMATS):
                raise ValueError(f"formats.{field}: {value!r} is not one of {', '.join(FORMATS)}")
            object.__setattr__(self, field, known)

MOST_MEMORY_BYTES = 1 << 50
MOST_MIGRATION_BYTES = 1 << 40

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "gpu": {
        "dtype": "bfloat16",
        # Measured on two H200s: the larger a step, the more of its time goes into products.
        "max_batch_tokens": 8192,
        "max_running": 512,
        # Likewise: 128 MiB in 10 ms by copy engine lengthen a memory-bound step by less than 0.35 %.
        "migration_bytes": 128 << 20,
        "migration_max_slowdown": 0.005,
    },
}
"""By EngineConfig.run_on: fields that have another default there."""

MAX_DEADLINE_S = 1e6
"""Eleven days. There is a limit because clocks count nanoseconds in 64 bits, into which infinity does not fit."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and limits of one deployment. Every rank holds the same values.

    A wrong value raises ValueError naming the field, the value and the allowed range.
    """

    num_ranks: int = 1
    run_on: str = "cpu"
    """What ranks compute on: "cpu" or "gpu". Which GPU a rank has, and whether it shares it, dist/place.py decides."""
    layout: Layout = Layout.TP
    dtype: str = "float32"
    """Arithmetic, weights and cache: float64 for proofs, float32, bfloat16."""
    formats: Formats = Formats()
    """Where weights or cache are stored as something else than `dtype`."""
    memory_bytes: int = 1 << 30
    """One rank's arena: workspaces, weights and cache pages together."""
    page_tokens: int = 64
    max_batch_tokens: int = 2048
    """Most tokens in one step, over all ranks."""
    max_running: int = 256
    """Most requests that hold cache at the same time."""
    max_context: int | None = None
    """Longest prompt + output in tokens; None takes the model's own limit."""
    absorbed_tokens: int = 1
    """Longest chunk that attends absorbed (against latent rows) instead of expanded, except in DOP."""
    dop_absorbed_tokens: int = 8
    """Like absorbed_tokens, for DOP, where an expanded chunk has to fetch its whole context from the owner."""
    context_block_tokens: int | None = None
    """Context rows that expanded attention up-projects at a time; sizes a workspace. None: see `context_block`."""
    max_wait_s: float = 60.0
    """A request that has waited longer goes before all that arrived after it, whatever their priorities."""
    plans_in_flight: int = 2
    """How many plans may be sent before the oldest one's result is waited for: 1 or 2."""
    layouts: tuple[Layout, ...] = ()
    """Layouts that the deployment may switch to besides `layout`. Requests may be as long as the layout with the least
    room allows."""
    migration_bytes: int = 1 << 20
    """The budget that switches begin with: what a rank may send, and receive, for a switch in a step of 10 ms or less;
    proportionally more in a longer step. From then on it is adapted to how much it slows down steps."""
    migration_max_slowdown: float = 0.05
    """By how much steps may be slower while a switch moves something; 0.05 is 5 %."""
    switch_deadline_s: float = 60.0
    """A switch that has not ended after so long is aborted."""
    switch_hold_s: float = 5.0
    """How long a switch may hold admissions while it waits for room."""
    step_deadline_s: float = 120.0
    """A rank that waits longer than this inside one step ends the run."""
    simulate_routing: str = ""
    """For performance work with random weights, whose routers prefer few experts: "uniform" replaces each token's
    choice of experts by a uniformly random one, which its layer, position and id decide alone. Outputs are nonsense."""
    experts_cut: str = "whole"
    """How routed experts are cut over the ranks: "whole", each on one rank, or "inside", a slice of every expert's
    intermediate size on each rank, so that all ranks read the same bytes whichever experts a step's tokens choose."""
    operators: str = "auto"
    """On GPUs: "own" kernels alone, or "auto": TensorRT-LLM's operators too, where they are right and faster."""
    capture_ahead: bool = True
    """On GPUs: likely steps are captured at the start, for about a minute. False: each when it comes for the second
    time, for measurements that need few."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", format_of(self.dtype))
        for layout in (self.layout, *self.layouts):
            if not isinstance(layout, Layout):
                field = "layout" if layout is self.layout else "layouts"
                raise ValueError(f"{field}: {layout!r} is not a Layout; Layout.parse makes one of a name")
        for field, allowed in (
            ("dtype", DTYPES),
            ("run_on", RUN_ON),
            ("simulate_routing", SIMULATED_ROUTING),
            ("experts_cut", EXPERTS_CUTS),
            ("operators", OPERATORS),
        ):
            if getattr(self, field) not in allowed:
                names = ", ".join(name or "an empty string" for name in allowed)
                raise ValueError(f"{field}: {getattr(self, field)!r} is not one of {names}")
        for field, low, high in (
            ("num_ranks", 1, 1024),
            ("memory_bytes", 1, MOST_MEMORY_BYTES),
            ("page_tokens", 1, 4096),
            ("max_batch_tokens", 1, 1 << 20),
            ("max_running", 1, 1 << 16),
            ("absorbed_tokens", 1, 1 << 20),
            ("dop_absorbed_tokens", 1, 1 << 20),
            ("context_block_tokens", 1, 1 << 20),
            ("plans_in_flight", 1, 2),
            ("migration_bytes", 1, MOST_MIGRATION_BYTES),
        ):
            value = getattr(self, field)
            if value is None and field == "context_block_tokens":
                continue
            if not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{field}: {value!r} is not a whole number from {low} to {high}")
        if self.max_context is not None and not (isinstance(self.max_context, int) and self.max_context >= 2):
            least = "from 2: one of the prompt and one of the output"
            raise ValueError(f"max_context: {self.max_context!r} is not a whole number of tokens {least}")
        for field in ("step_deadline_s", "switch_deadline_s"):
            if not 0 < getattr(self, field) <= MAX_DEADLINE_S:
                seconds = f"a number of seconds above 0 and at most {MAX_DEADLINE_S:.0f}"
                raise ValueError(f"{field}: {getattr(self, field)} is not {seconds}")
        for field in ("switch_hold_s", "migration_max_slowdown", "max_wait_s"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{field}: {getattr(self, field)} is negative")
        if self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens: {self.max_batch_tokens} is below max_running ({self.max_running}); every running "
                "request needs room for one token in a step: raise max_batch_tokens or lower max_running"
            )

    def most_absorbed(self, layout: Layout) -> int:
        """Tokens of the longest chunk that attends absorbed in that layout."""
        return self.dop_absorbed_tokens if layout is Layout.DOP else self.absorbed_tokens

    @property
    def context_block(self) -> int:
        """context_block_tokens. If it is not given: 1,024, and on GPUs at least two whole steps' tokens, since only
        steps whose context fits into one block are captured."""
        if self.context_block_tokens is not None:
            return self.context_block_tokens
        return 1024 if self.run_on == "cpu" else max(1024, 2 * self.max_batch_tokens)

    @property
    def itemsize(self) -> int:
        """Bytes of one number of `dtype`."""
        return {"float64": 8, "float32": 4, "bfloat16": 2}[self.dtype]

    @property
    def allowed_layouts(self) -> tuple[Layout, ...]:
        """`layout` and `layouts`, each once, in the enumeration's order."""
        return tuple(sorted({self.layout, *self.layouts}))

    def context_of(self, max_positions: int) -> int:
        """Longest prompt + output in tokens, for a model that was made for max_positions."""
        return min(max_positions, self.max_context or max_positions)
