"""The plugin layers that tests build, at the sizes of splash-tiny: what goes in, and what a step of it looks like.

A query per token, T tokens, P pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Dim = int | str

HEADS, WIDTH, LATENT = 4, 80, 64
NOPE, VALUE = 24, 32
LAYERS, PAGE_TOKENS = 3, 16
EXPERTS, HIDDEN, INNER, TOP_K = 4, 64, 48, 2
ALL_EXPERTS, MAX_TOKENS = 8, 16
RANKS, ALL_HEADS = 2, 8


@dataclass(frozen=True)
class Layer:
    """inputs: name -> (dims, dtype); "rows" stands for the dtype under test."""

    plugin: str
    inputs: Mapping[str, tuple[Sequence[Dim], str]]
    outputs: Mapping[str, tuple[Sequence[Dim], str]]
    attributes: Mapping[str, int | float] = field(default_factory=dict)
    alias: int = -1
    """Which input the one output is, -1: none."""


POOL = (("P", LAYERS, PAGE_TOKENS, WIDTH), "rows")
PER_TOKEN = (("T",), "int32")

LAYERS_TESTED = (
    Layer(
        "splash::lse_merge",
        {"outs": ((3, "T", HEADS, LATENT), "float32"), "lses": ((3, "T", HEADS), "float32")},
        {"out": (("T", HEADS, LATENT), "float32"), "lse": (("T", HEADS), "float32")},
    ),
    Layer(
        "splash::cache_append",
        {"pool": POOL, "rows": (("T", WIDTH), "rows"), "page": PER_TOKEN, "offset": PER_TOKEN},
        {"written": POOL},
        {"layer": 1},
        alias=0,
    ),
    Layer(
        "splash::page_transfer",
        {
            "source": (("Q", LAYERS, PAGE_TOKENS, WIDTH), "rows"),
            "taken": PER_TOKEN,
            "placed": PER_TOKEN,
            "pool": POOL,
        },
        {"written": POOL},
        alias=3,
    ),
    Layer(
        "splash::mla_attention",
        {
            "q": (("T", HEADS, WIDTH), "rows"),
            "pool": POOL,
            "tables": (("slots", "C"), "int32"),
            "slot": PER_TOKEN,
            "first": PER_TOKEN,
            "length": PER_TOKEN,
        },
        {"out": (("T", HEADS, LATENT), "rows"), "lse": (("T", HEADS), "float32")},
        {"layer": 2, "stride": 1, "latent": LATENT, "scale": 0.125},
    ),
    Layer(
        "splash::mla_prefill",
        {
            "q": (("T", HEADS, NOPE + WIDTH - LATENT), "rows"),
            "position": PER_TOKEN,
            "rows": (("R", WIDTH), "rows"),
            "k_nope": (("R", HEADS, NOPE), "rows"),
            "v": (("R", HEADS, VALUE), "rows"),
            "segments": (("S", 5), "int32"),
            "tiles": (("tiles", 2), "int32"),
        },
        {"out": (("T", HEADS, VALUE), "rows"), "lse": (("T", HEADS), "float32")},
        {"scale": 0.125},
    ),
    Layer(
        "splash::grouped_experts_up",
        {
            "x": (("T", HIDDEN), "rows"),
            "choice": (("T", TOP_K), "int32"),
            "gate_up": ((EXPERTS, 2 * INNER, HIDDEN), "rows"),
        },
        {"hidden": (("pairs", INNER), "rows")},
        {"first_expert": 4, "max_tokens": MAX_TOKENS},
    ),
    Layer(
        "splash::grouped_experts_down",
        {
            "hidden": (("pairs", INNER), "rows"),
            "down": ((EXPERTS, HIDDEN, INNER), "rows"),
            "choice": (("T", TOP_K), "int32"),
            "weight": (("T", TOP_K), "float32"),
        },
        {"out": (("T", HIDDEN), "rows")},
        {"first_expert": 4, "max_tokens": MAX_TOKENS},
    ),
    Layer(
        "splash::dop_put",
        {"box": (("M",), "rows"), "rows": (("T", HEADS, WIDTH), "rows")},
        {"written": (("M",), "rows")},
        {"start": 16384},
        alias=0,
    ),
    Layer(
        "splash::dop_exchange",
        {"box": (("M",), "rows"), "bases": ((RANKS,), "int64"), "owned": (("B",), "int32")},
        {"out": (("B", ALL_HEADS, WIDTH), "rows")},
        {"start": 16384, "heads": ALL_HEADS, "width": WIDTH, "rank": 1, "ranks": RANKS},
    ),
    Layer(
        "splash::dop_return",
        {"box": (("M",), "rows"), "bases": ((RANKS,), "int64"), "owner": PER_TOKEN, "place": PER_TOKEN},
        {"out": (("T", HEADS, LATENT), "rows")},
        {
            "start": 16384,
            "heads": ALL_HEADS,
            "first_head": 4,
            "own_heads": HEADS,
            "latent": LATENT,
            "rank": 1,
            "ranks": RANKS,
        },
    ),
)

BY_NAME = {layer.plugin.removeprefix("splash::"): layer for layer in LAYERS_TESTED}


def sizes_of(tokens: int) -> dict[str, int]:
    """What the named dimensions are in a step of `tokens` tokens."""
    fixed = {"P": 9, "Q": 7, "slots": 5, "C": 4, "M": 40000, "R": 30, "S": 2, "tiles": 3}
    return {**fixed, "T": tokens, "pairs": tokens * TOP_K, "B": max(1, tokens // 2)}
