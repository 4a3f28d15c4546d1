"""The proofs about a step's program can fail: with a mistake planted in it, what is served is noticed to be wrong. Each
case first runs without the mistake and agrees with what one rank serves, which agrees with an oracle (test_oracle.py).

Numbers for kernels alone (`offsets`, `absorbed_offsets`) are not among them: on a CPU nobody reads them.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from splash_plugins.lse_merge.reference import lse_merge
from splash_plugins.mla_attention.tiles import tiles_of
from splash_plugins.shard_sample import reference as shard_sample
from splash_trt.config import Layout
from splash_trt.request import Request, SamplingParams
from splash_trt.runtime import context_rounds, step_arrays
from splash_trt.runtime.device_runner import DeviceRunner
from splash_trt.runtime.peers import CollectivePeers
from tests.device_ranks import device_ranks
from tests.planting import Edit, Plant, given, giving, kernel, put
from tests.switching.harness import Server, Told, assert_same, make_requests, never_switched, noticed, write_model

TP, DP, CP, DOP = Layout.TP, Layout.DP, Layout.CP, Layout.DOP
PADDED, PLAIN = (2, 4, 7, 16), ()
SCORED, DRAWN, FILTERED = "log-probabilities", "temperature alone", "filters"
"""What requests want: what is told tells most, but only the others take the way that graphs hold."""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    layout: Layout
    plant: Plant
    sizes: tuple[int, ...] = PADDED
    wish: str = SCORED


def plus(number: int) -> Edit:
    return lambda x: x + number


def nothing(*arguments: Any, **options: Any) -> None:
    pass


def first_left_out(index: torch.Tensor) -> torch.Tensor:
    """The first one that is no padding."""
    out = index.clone()
    out[(out >= 0).nonzero()[:1]] = -1
    return out


def turned(array: np.ndarray) -> np.ndarray:
    """Each that is no padding in the next one's place."""
    out = array.copy()
    out[out >= 0] = np.roll(out[out >= 0], 1)
    return out


def one_shorter(length: torch.Tensor) -> torch.Tensor:
    return (length - 1).clamp(min=0)


def halves_swapped(heads: torch.Tensor) -> torch.Tensor:
    """[A, H, ...] with the heads in the order of the last to the first."""
    return heads.flip(1)


def tiles_but_one(segments: np.ndarray) -> np.ndarray:
    return tiles_of(segments)[1:]


def sum_without_last(self: CollectivePeers, partial: torch.Tensor, *rest: Any) -> torch.Tensor | None:
    return sum_rows(self, partial if self.rank < self.size - 1 else torch.zeros_like(partial), *rest)


sum_rows = CollectivePeers.sum_rows


def plain_mean(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return lse_merge(outs, torch.where(lses.isinf(), lses, 0.0))


def array(name: str, edit: Edit) -> Plant:
    """One of a step's arrays is another, before it is padded."""
    change: Edit = lambda arrays: arrays | {name: edit(arrays[name])}  # noqa: E731
    return put("splash_trt.runtime.step_arrays._padded", given(step_arrays._padded, arrays=change))


def peers(name: str, **edits: Edit) -> Plant:
    return put(f"splash_trt.runtime.peers.CollectivePeers.{name}", given(getattr(CollectivePeers, name), **edits))


def answer_of_peers(name: str, edit: Edit) -> Plant:
    return put(f"splash_trt.runtime.peers.CollectivePeers.{name}", giving(getattr(CollectivePeers, name), edit))


def rounds(**edits: Edit) -> Plant:
    """Some of what context rounds say is something else."""

    def edit(found: tuple[context_rounds.Round, ...]) -> Any:
        return tuple(replace(r, **{name: change(getattr(r, name)) for name, change in edits.items()}) for r in found)

    return put("splash_trt.runtime.step_arrays.expanded_rounds", giving(context_rounds.expanded_rounds, edit))


def column(index: int, by: int) -> Edit:
    """Of segments."""

    def edit(segments: np.ndarray) -> np.ndarray:
        out = segments.copy()
        out[:, index] += by
        return out

    return edit


def kernel_given(name: str, **edits: Edit) -> Plant:
    return kernel(name, lambda function: given(function, **edits))


UNROTATED: dict[str, Edit] = {"cos": torch.ones_like, "sin": torch.zeros_like}
SAMPLE = "splash_plugins.shard_sample.reference"

MISTAKES: dict[str, Mistake] = {
    # Kernels
    "vocabulary cut one id off": Mistake(layout=TP, plant=kernel_given("embed", first_id=plus(1))),
    "a decode takes id 0, not what was sampled": Mistake(
        layout=DP, plant=kernel_given("embed", last_sampled=torch.zeros_like), wish=DRAWN
    ),
    "attention's output is not added": Mistake(
        layout=DP, plant=kernel_given("add_norm", delta=lambda x: None if x is None else torch.zeros_like(x))
    ),
    "a row is not stored": Mistake(layout=TP, plant=kernel_given("latent_rows", page=first_left_out)),
    "a row is not stored by its owner": Mistake(
        layout=DOP, plant=kernel_given("latent_rows", page=first_left_out), sizes=PLAIN
    ),
    "keys are not rotated": Mistake(layout=DP, plant=kernel_given("latent_rows", **UNROTATED)),
    "queries of prompts are not rotated": Mistake(layout=CP, plant=kernel("rope_q", lambda function: nothing)),
    "queries of decodes are not rotated": Mistake(layout=TP, plant=kernel_given("absorb", **UNROTATED)),
    "travelling rows are not stored": Mistake(layout=CP, plant=kernel("append", lambda function: nothing)),
    "decodes do not see their own row": Mistake(layout=TP, plant=kernel_given("decode_values", length=one_shorter)),
    "nor at their owner": Mistake(layout=DOP, plant=kernel_given("decode", length=one_shorter)),
    "nor in their stripe": Mistake(layout=CP, plant=kernel_given("decode", length=one_shorter), sizes=PLAIN),
    "stripes read as if all pages were here": Mistake(layout=CP, plant=kernel_given("decode", stride=lambda stride: 1)),
    "values of other heads": Mistake(layout=DOP, plant=kernel_given("value_up", w_uv=lambda w: w.flip(0))),
    "a row of a context is not gathered": Mistake(layout=TP, plant=kernel_given("gather", page=first_left_out)),
    "prompts see the next token": Mistake(layout=TP, plant=kernel_given("prefill", position=plus(1))),
    "prompts do not see the token itself": Mistake(
        layout=CP, plant=kernel_given("prefill", position=plus(-1)), sizes=PLAIN
    ),
    "a round takes the place of those before": Mistake(
        layout=DP, plant=kernel_given("prefill", merge=lambda merge: False), sizes=PLAIN
    ),
    "the last token has no experts": Mistake(layout=TP, plant=kernel_given("route", num_tokens=plus(-1))),
    "weights of experts are equal": Mistake(
        layout=DOP, plant=kernel_given("grouped_experts", weight=lambda w: w.mean(1, keepdim=True).expand_as(w))
    ),
    "experts cut one off": Mistake(layout=CP, plant=kernel_given("grouped_experts", first_expert=plus(1))),
    "shared experts are left out": Mistake(
        layout=TP, plant=kernel_given("grouped_experts", addend=lambda addend: None)
    ),
    "gate and up swapped": Mistake(layout=DOP, plant=kernel_given("gated", gate_up=lambda w: w.flip(0))),
    "gate and up swapped in experts": Mistake(
        layout=DP, plant=kernel_given("grouped_experts", gate_up=lambda w: w.roll(w.shape[1] // 2, 1))
    ),
    # How ranks meet
    "rounds merged without their weights": Mistake(
        layout=TP, plant=put("splash_plugins.mla_attention.prefill_reference.lse_merge", plain_mean), sizes=PLAIN
    ),
    "stripes merged without their weights": Mistake(
        layout=CP, plant=put("splash_trt.runtime.peers.lse_merge", plain_mean)
    ),
    "a rank's part is left out of sums": Mistake(
        layout=TP, plant=put("splash_trt.runtime.peers.CollectivePeers.sum_rows", sum_without_last)
    ),
    "the residual is not added to": Mistake(layout=DP, plant=peers("sum_rows", hidden=torch.clone)),
    "tokens gathered in another order": Mistake(
        layout=DP, plant=answer_of_peers("gather_rows", lambda x: x.roll(1, 0))
    ),
    "wanted rows of another rank": Mistake(layout=CP, plant=peers("pick_rows", row=lambda row: row.clamp(max=0))),
    "heads in another order on the way to owners": Mistake(
        layout=DOP, plant=answer_of_peers("to_owners", halves_swapped)
    ),
    "heads in another order on the way back": Mistake(layout=DOP, plant=peers("to_heads", out=halves_swapped)),
    "context rows of another place": Mistake(layout=DOP, plant=peers("context_rows", offset=lambda x: x.roll(1))),
    "another rank's rows merged": Mistake(layout=CP, plant=peers("merge_parts", out=lambda x: x.roll(1, 0))),
    # A step's arrays
    "ids sampled for the next slot": Mistake(layout=TP, plant=array("id_slot", turned), wish=DRAWN),
    "rows stored one further": Mistake(layout=DP, plant=array("offset", lambda x: (x + 1) % 8)),
    "decodes read the next slot": Mistake(layout=DOP, plant=array("read_slot", turned)),
    "decodes read what is not there yet": Mistake(layout=TP, plant=array("read_length", plus(1))),
    "stripes begin at the next page": Mistake(layout=CP, plant=array("read_first", lambda x: 1 - x)),
    "owners take other tokens": Mistake(layout=DOP, plant=array("owned", turned)),
    "results of another token": Mistake(layout=DOP, plant=array("owner_place", lambda x: 0 * x)),
    "travelling rows one further": Mistake(layout=CP, plant=array("stripe_offset", lambda x: (x + 1) % 8)),
    "wanted rows of another token": Mistake(layout=TP, plant=array("want_row", turned)),
    "ids left under another slot": Mistake(layout=DP, plant=array("want_slot", turned), wish=DRAWN),
    "another slot's temperature": Mistake(layout=DP, plant=array("temperature", turned), wish=DRAWN),
    "another slot's seed": Mistake(layout=TP, plant=array("seed", turned), wish=DRAWN),
    "noise of the position before": Mistake(layout=CP, plant=array("want_position", plus(-1)), wish=DRAWN),
    # Context rounds, and what reads them
    "keys begin one later": Mistake(layout=TP, plant=rounds(segments=column(4, 1))),
    "a segment lacks its last query": Mistake(layout=DP, plant=rounds(segments=column(1, -1))),
    "a segment lacks its last key": Mistake(layout=CP, plant=rounds(segments=column(3, -1)), sizes=PLAIN),
    "context rows one further": Mistake(layout=TP, plant=rounds(offset=lambda x: (x + 1) % 8)),
    "a tile is left out": Mistake(layout=DOP, plant=put("splash_trt.runtime.upload.tiles_of", tiles_but_one)),
    # Sampling
    "ids of the shard, not of the vocabulary": Mistake(
        layout=TP,
        plant=put(f"{SAMPLE}.best_of_shard", given(shard_sample.best_of_shard, first_id=lambda first_id: 0)),
        wish=DRAWN,
    ),
    "the best of one shard": Mistake(
        layout=DOP,
        plant=put(f"{SAMPLE}.best_of_shards", given(shard_sample.best_of_shards, found=lambda found: found[:1])),
        wish=DRAWN,
    ),
    "filters are left out": Mistake(
        layout=TP, plant=put("splash_trt.runtime.device_runner.is_plain", lambda *_: True), wish=FILTERED
    ),
    "another row's sampling parameters": Mistake(
        layout=CP,
        plant=put("splash_trt.runtime.device_runner.DeviceRunner._sample", given(DeviceRunner._sample, slot=turned)),
        wish=FILTERED,
    ),
}


def asked(wish: str) -> list[Request]:
    """Prompts of one token to several rounds of context, which decode together while others still prefill."""
    requests = make_requests(7, max_tokens=8)
    if wish == SCORED:
        return requests
    out = []
    for i, request in enumerate(requests):
        sampling = msgspec.structs.replace(request.sampling, logprobs=None)
        if wish == DRAWN:
            sampling = SamplingParams(max_tokens=8, temperature=0.6 * (i % 3), seed=i, ignore_eos=True)
        out.append(msgspec.structs.replace(request, sampling=sampling))
    return out


def serve(folder: Path, mistake: Mistake, expected: dict[str, Told]) -> dict[str, Told]:
    """What requests are told with the mistake planted, until that is noticed."""
    with ExitStack() as planted:
        mistake.plant(planted)
        planted.enter_context(device_ranks(mistake.sizes))
        config = {"absorbed_tokens": 3, "dop_absorbed_tokens": 3}
        with Server(folder, ranks=2, layout=mistake.layout, pages=60, **config) as server:
            server.add(*asked(mistake.wish))
            while not (server.orchestrator.idle or noticed(server.told, expected)):
                server.step()
            if server.orchestrator.idle:
                server.scheduler.check_idle()
    return server.told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, dict[str, Told]]:
    return {wish: never_switched(folder, asked(wish)) for wish in (SCORED, DRAWN, FILTERED)}


CLEAN = sorted({(m.layout, m.sizes, m.wish) for m in MISTAKES.values()})


@pytest.mark.parametrize(("layout", "sizes", "wish"), CLEAN)
def test_without_a_mistake(
    folder: Path, expected: dict[str, dict[str, Told]], layout: Layout, sizes: tuple[int, ...], wish: str
) -> None:
    told = serve(folder, Mistake(layout=layout, plant=nothing, sizes=sizes, wish=wish), expected[wish])
    assert_same(told, expected[wish])


@pytest.mark.parametrize("what", list(MISTAKES))
def test_a_planted_mistake_is_noticed(folder: Path, expected: dict[str, dict[str, Told]], what: str) -> None:
    right = expected[MISTAKES[what].wish]
    assert noticed(serve(folder, MISTAKES[what], right), right)
