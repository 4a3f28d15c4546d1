"""Builds every plan (serialised TensorRT engine) that a model needs: one for each kind of segment and sizes of weights.

A plan's key is a hash of everything that decides its content: the network, the profiles, the GPUs, and the builder with
its version. So equal segments of different layouts, ranks and models are built once, and never again while they are in
the cache.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any

from splash_engines.manifest import checksum
from splash_engines.tensorrt.cache import Entry, PlanCache
from splash_engines.tensorrt.graph import Graph
from splash_engines.tensorrt.segments import SEGMENTS, Lowering
from splash_engines.tensorrt.sizes import Sizes, sizes_of
from splash_engines.trt_api import Api
from splash_trt.config import PLAN_DTYPES, Layout
from splash_trt.layout.spec import SPECS, Tokens
from splash_trt.models.config import LayerKind, ModelConfig

RECIPE = 1
"""Counts up when plans of the same network are to be built in another way: it is part of their keys."""
SMALL_EXPERTS = 32
"""Up to this many experts, the form in which every expert computes every token is worth having."""
MOST_RANKS, MOST_TOKENS, MOST_PAGE_TOKENS = 1024, 1 << 20, 4096
"""The largest values that a server can be started with (EngineConfig)."""

Range = tuple[int, int, int]
"""The least, the best (optimised for) and the largest size of a dimension."""
TensorList = tuple[tuple[str, tuple[int, ...], str], ...]
"""(name, shape with -1 for what varies, TensorRT's name of the dtype) of each tensor."""
Progress = Callable[[str, float], None]
"""Called with what is being built and how much of all plans is done, 0 to 1."""


class Form(str, Enum):
    """Where attention and experts are computed."""

    PLUGIN = "plugin"  # by kernels, between the networks
    PRIMITIVE = "primitive"  # by networks of their own, made of primitives; for small models


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    targets: tuple[str, ...]
    """GPUs, such as sm_89."""
    ranks: tuple[int, ...]
    """The numbers of ranks that plans are built for."""
    layouts: tuple[Layout, ...] = tuple(Layout)
    dtype: str = "bfloat16"
    max_batch_tokens: int = 8192
    page_tokens: int = 64
    form: Form | None = None
    """None: the one that suits the model's size."""
    collectives_in: bool = False
    """Sums over ranks are DistCollective layers in the networks, for layouts in which every rank has all tokens."""

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1 or max(self.ranks) > MOST_RANKS:
            given = ",".join(map(str, self.ranks))
            raise ValueError(f"ranks: {given!r} must be one or more numbers from 1 to {MOST_RANKS}, such as 1,2,4")
        if self.dtype not in PLAN_DTYPES:
            allowed = " or ".join(PLAN_DTYPES)
            raise ValueError(f"dtype: {self.dtype!r} is none that networks are built in; give {allowed}")
        for name, most in (("max_batch_tokens", MOST_TOKENS), ("page_tokens", MOST_PAGE_TOKENS)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name}: {getattr(self, name)} is not from 1 to {most}")

    def form_for(self, model: ModelConfig) -> Form:
        if self.form is not None:
            return self.form
        many = model.experts is not None and model.experts.num_experts > SMALL_EXPERTS
        return Form.PLUGIN if many else Form.PRIMITIVE

    def profiles(self, model: ModelConfig) -> tuple[Mapping[str, Range], ...]:
        """The profiles for decode steps and for prefill steps (one if they are the same); ranges by the dimensions'
        names (graph.input)."""
        pages = -(-model.max_positions // self.page_tokens)
        same = {
            "C": _range(2048, max(1024, 2 * self.max_batch_tokens)),  # EngineConfig.context_block on GPUs
            "U": _range(16, pages),
            "rows": _range(1 << 16, (1 << 31) // max(1, model.row_width)),
        }
        few, many = _range(64, min(512, self.max_batch_tokens)), _range(2048, self.max_batch_tokens)
        kinds = [few] if many[2] <= few[2] else [few, many]
        return tuple({**same, "T": tokens, "n": tokens} for tokens in kinds)


def _range(best: int, most: int) -> Range:
    return 1, min(best, most), most


@dataclass(frozen=True, kw_only=True)
class Use:
    """The plans that one rank uses under one layout: keys by kind, for kinds in which it has something to compute.

    A kind is a name in segments.SEGMENTS, or attend_absorbed.H or attend_expanded.H for H heads.
    """

    num_ranks: int
    layout: Layout
    rank: int
    plans: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Plan:
    key: str
    kind: str
    """As in Use."""
    inputs: TensorList
    outputs: TensorList
    num_bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class PlanSet:
    builder: str
    """TensorRT's package and version."""
    settings: PlanSettings
    form: Form
    plans: Mapping[str, Plan]
    """By key."""
    uses: tuple[Use, ...]


@dataclass(frozen=True, kw_only=True)
class Built:
    plans: PlanSet
    seconds: Mapping[str, float]
    """How long building each plan took, now or when it was put into the cache; by key."""
    cached: frozenset[str]
    """Keys of plans that were in the cache already."""


def build_plans(
    api: Api, model: ModelConfig, settings: PlanSettings, cache: PlanCache, progress: Progress | None = None
) -> Built:
    """Builds the plans that are not in `cache` yet. BuildFailure names the segment and the node. A KeyboardInterrupt
    ends the build at TensorRT's next step. `progress` is called on another thread; an exception from it ends the build
    too."""
    stopped = threading.Event()

    def report(phase: str, done: float) -> None:
        if stopped.is_set():
            raise InterruptedError("the build was stopped")
        if progress is not None:
            progress(phase, done)

    # Signals raise exceptions in the main thread only, which must not be inside a function that TensorRT calls then.
    with ThreadPoolExecutor(1, thread_name_prefix="tensorrt-build") as thread:
        try:
            return thread.submit(_build_plans, api, model, settings, cache, report).result()
        except BaseException:
            stopped.set()
            raise


def _build_plans(api: Api, model: ModelConfig, settings: PlanSettings, cache: PlanCache, progress: Progress) -> Built:
    builder = api.create_builder()
    waiting: dict[str, Graph] = {}
    uses = tuple(_uses(api, builder, model, settings, waiting))
    plans: dict[str, Plan] = {}
    seconds: dict[str, float] = {}
    cached: set[str] = set()
    for index, (key, graph) in enumerate(waiting.items()):

        def report(phase: str, done: float, index: int = index, kind: str = graph.segment) -> None:
            progress(kind, (index + done) / len(waiting))

        report("", 0.0)
        entry = cache.find(key)
        if entry is not None:
            cached.add(key)
        else:
            begin = time.monotonic()
            config = api.create_config(builder, settings.targets)
            for profile in settings.profiles(model):
                config.add_optimization_profile(_profile(builder, graph, profile))
            data = api.build(builder, graph.network, config, report)
            entry = cache.add(key, data, time.monotonic() - begin)
        plans[key] = _plan(key, graph, entry)
        seconds[key] = entry.seconds
    progress("", 1.0)
    found = PlanSet(
        builder=f"{api.name} {api.version}", settings=settings, form=settings.form_for(model), plans=plans, uses=uses
    )
    return Built(plans=found, seconds=seconds, cached=frozenset(cached))


def kinds_of(model: ModelConfig, sizes: Sizes, form: Form) -> list[tuple[str, int]]:
    """(kind, heads) of every segment that a rank may have; heads is 0 except for attention's primitive form."""
    kinds = [kind for kind in SEGMENTS if kind not in ("moe", "moe_in", "dense_mlp")]
    if LayerKind.DENSE in model.layers:
        kinds.append("dense_mlp")
    if LayerKind.MOE in model.layers:
        kinds.append("moe" if form is Form.PRIMITIVE else "moe_in")
    found = [(kind, 0) for kind in kinds]
    if form is Form.PRIMITIVE:
        absorbed, *expanded = sizes.attend_heads
        found += [("attend_absorbed", absorbed)] if absorbed else []
        found += [("attend_expanded", heads) for heads in sorted(set(expanded))]
    return found


def _uses(
    api: Api, builder: Any, model: ModelConfig, settings: PlanSettings, waiting: dict[str, Graph]
) -> Iterator[Use]:
    """What each rank uses under each layout. Puts each different network once into `waiting`, by its plan's key."""
    lowered: dict[Any, tuple[str, str] | None] = {}
    """(segment, key) of networks that were made already; None if there was nothing to compute."""
    for num_ranks in settings.ranks:
        for layout in settings.layouts:
            summed = settings.collectives_in and SPECS[layout].tokens is Tokens.EVERYWHERE and num_ranks > 1
            lowering = Lowering(
                api=api, builder=builder, model=model, dtype=settings.dtype, num_ranks=num_ranks if summed else 0
            )
            for rank in range(num_ranks):
                sizes = sizes_of(model, layout, rank, num_ranks, settings.page_tokens)
                plans = {}
                for kind, heads in kinds_of(model, sizes, settings.form_for(model)):
                    asked = (kind, heads, sizes, lowering.num_ranks)
                    if asked not in lowered:
                        lowered[asked] = None
                        graph = lowering(kind, sizes, heads)
                        if graph is not None:
                            key = _key(api, model, settings, graph)
                            waiting.setdefault(key, graph)
                            lowered[asked] = (graph.segment, key)
                    if (found := lowered[asked]) is not None:
                        plans[found[0]] = found[1]
                yield Use(num_ranks=num_ranks, layout=layout, rank=rank, plans=plans)


def _key(api: Api, model: ModelConfig, settings: PlanSettings, graph: Graph) -> str:
    profiles = [sorted(profile.items()) for profile in settings.profiles(model)]
    content = [RECIPE, api.name, api.version, list(settings.targets), profiles, graph.fingerprint]
    return checksum(json.dumps(content).encode())


def _profile(builder: Any, graph: Graph, ranges: Mapping[str, Range]) -> Any:
    profile = builder.create_optimization_profile()
    for i in range(graph.network.num_inputs):
        tensor = graph.network.get_input(i)
        if -1 in tensor.shape:
            names = [tensor.get_dimension_name(axis) for axis in range(len(tensor.shape))]
            shapes = [
                tuple(ranges[name][end] if n < 0 else n for n, name in zip(tensor.shape, names, strict=True))
                for end in range(3)
            ]
            profile.set_shape(tensor.name, *shapes)
    return profile


def _plan(key: str, graph: Graph, entry: Entry) -> Plan:
    network = graph.network
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    return Plan(
        key=key,
        kind=graph.segment,
        inputs=_tensors(inputs),
        outputs=_tensors(outputs),
        num_bytes=entry.num_bytes,
        checksum=entry.checksum,
    )


def _tensors(tensors: Sequence[Any]) -> TensorList:
    return tuple((t.name, tuple(t.shape), t.dtype.name) for t in tensors)
