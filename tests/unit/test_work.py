"""The operations of a step against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from splash_trt.config import EXPERTS_CUTS, Formats, Layout
from splash_trt.models.config import ModelConfig
from splash_trt.scheduler.batch import Batch
from splash_trt.scheduler.work import LayoutWork, largest_share, row_bytes
from splash_trt.weights import formats as stored
from splash_trt.weights.shards import cut_ranges
from splash_trt.weights.spec import Cut, tensor_specs
from tests.unit.cost_cases import config, decode, deepseek_v3, prefill, splash_tiny

FP8 = Formats(weights="fp8", attention="fp8")


def named(  # type: ignore[no-untyped-def]
    model: ModelConfig,
    batch: Batch,
    num_ranks: int,
    formats: Formats | None = None,
    dtype: str = "bfloat16",
    **fields: object,
):
    """Per operation: (flops [N], bytes [N], launches [N])."""
    deployment = replace(config(num_ranks, formats, dtype), **fields)  # type: ignore[arg-type]
    work = LayoutWork(model, deployment, batch.layout)
    x = work.quantities.of(batch, work.quantities.sums(batch))
    ranks = (len(work.operations), num_ranks)
    values = [np.broadcast_to(part, ranks) for part in (work.flops @ x, work.bytes @ x, work.launches @ x)]
    return {op.name: tuple(part[i] for part in values) for i, op in enumerate(work.operations)}


# splash-tiny: D 256, H 8, L 64, R 16, nope 32, v 32, Q 96, 8 layers (1 dense of 512), 16 experts of 32, 4 chosen


def test_splash_tiny_decoding_on_one_rank() -> None:
    found = named(splash_tiny(), decode(Layout.TP, 1, 3, 100), 1, dtype="float32")
    flops = {name: values[0][0] for name, values in found.items()}
    assert flops["qkv_a"] == 8 * 2 * 3 * 256 * (96 + 64 + 16)
    assert flops["q_up"] == 8 * 2 * 3 * 96 * 8 * 48
    assert flops["absorb"] == flops["v_up"] == 8 * 2 * 3 * 8 * 32 * 64
    assert flops["mla_decode"] == 8 * 2 * 8 * (2 * 64 + 16) * 300
    assert flops["o_proj"] == 8 * 2 * 3 * 8 * 32 * 256
    assert flops["dense_mlp"] == 2 * 3 * 3 * 256 * 512
    assert flops["router"] == 7 * 2 * 3 * 256 * 16
    assert flops["experts"] == 7 * 2 * 3 * 4 * 3 * 256 * 32
    assert flops["shared_mlp"] == 7 * 2 * 3 * 3 * 256 * 32
    assert flops["head"] == 2 * 3 * 256 * 2048
    assert flops["expand_kv"] == flops["mla_prefill"] == 0
    bytes_ = {name: values[1][0] for name, values in found.items()}
    assert bytes_["mla_decode"] == 8 * 4 * (300 * 80 + 3 * 8 * (80 + 64))
    assert bytes_["router"] == 7 * 4 * (256 * 16 + 3 * (256 + 16))
    touched = 16 * (1 - (3 / 4) ** 3)
    assert bytes_["experts"] == 7 * 4 * 3 * 4 * (2 * 256 + 3 * 32)
    assert bytes_["expert_weights"] == pytest.approx(7 * 4 * touched * 3 * 256 * 32)
    assert found["expert_loop"][2][0] == pytest.approx(7 * touched)
    assert not any(name.endswith(("_sum", "_gather")) for name in found)  # one rank talks to nobody


def test_splash_tiny_prefilling_on_two_ranks_of_tp() -> None:
    """A chunk of 40 tokens after 100: 140 rows of context, token i meets 100 + i + 1 of them."""
    found = named(splash_tiny(), prefill(Layout.TP, 2, 40, 100), 2, dtype="float32")
    pairs = sum(100 + i + 1 for i in range(40))
    assert found["mla_prefill"][0].tolist() == [8 * 2 * 4 * (48 + 32) * pairs] * 2
    assert found["expand_kv"][0].tolist() == [8 * 2 * 140 * 64 * 4 * (32 + 32)] * 2
    # An all-reduce among two sends and gets the whole tensor once.
    assert found["o_sum"][1].tolist() == [8 * 40 * 256 * 4] * 2
    assert found["o_sum"][2].tolist() == [8, 8]
    assert found["absorb"][0].tolist() == found["mla_decode"][2].tolist() == [0, 0]


def test_one_request_of_v3_reads_its_active_parameters_once() -> None:
    """37 billion of 671 (the embedding's 0.9 among them, of which one row is read), over 8 ranks, in bytes of FP8.

    What every rank reads is on top of its eighth: q_a, kv_a and the router.
    """
    model = deepseek_v3()
    found = named(model, decode(Layout.TP, 8, 1, 1), 8, FP8)
    everywhere = 61 * 7168 * (1536 + 576) + 58 * 7168 * 256 * 2
    head = 129280 * 7168 * 2 / 8
    eighth = (37e9 - 2 * 129280 * 7168 - everywhere) / 8
    collectives = ("embed_sum", "o_sum", "mlp_sum", "sampler_gather")
    total = sum(values[1][0] for name, values in found.items() if name not in collectives)
    assert total == pytest.approx(everywhere + eighth + head, rel=0.03)


def test_a_crowd_touches_all_experts() -> None:
    model = deepseek_v3()
    few, many = (named(model, decode(Layout.TP, 8, n, 1), 8, FP8) for n in (1, 4096))
    expert = 3 * 7168 * 2048 * (1 + 4 / 128**2)
    assert few["expert_weights"][1][0] == pytest.approx(58 * expert, rel=0.01)
    assert many["expert_weights"][1][0] == pytest.approx(58 * 32 * expert, rel=0.01)
    assert many["experts"][1][0] == 58 * 4096 * (2 * 7168 + 3 * 2048) * 2


def test_experts_cut_inside_are_all_hit_and_read_in_part() -> None:
    """Of splash-tiny's 16 experts of 32, on two ranks: as many operations and bytes of weights, twice the rows."""
    batch = decode(Layout.TP, 2, 3, 100)
    whole, inside = (named(splash_tiny(), batch, 2, dtype="float32", experts_cut=cut) for cut in EXPERTS_CUTS)
    touched = 16 * (1 - (3 / 4) ** 3)
    assert inside["expert_loop"][2] == pytest.approx([7 * touched] * 2)
    assert inside["experts"][0].tolist() == whole["experts"][0].tolist() == [7 * 2 * 3 * 2 * 3 * 256 * 32] * 2
    for found, rows, inner in ((whole, 3 * 2, 32), (inside, 3 * 4, 16)):
        assert found["expert_weights"][1] == pytest.approx([7 * 4 * touched / 2 * 3 * 256 * 32] * 2)
        assert found["experts"][1] == pytest.approx([7 * 4 * rows * (2 * 256 + 3 * inner)] * 2)
    apart = ("experts", "expert_weights", "expert_loop")
    assert all((inside[name][1] == whole[name][1]).all() for name in whole if name not in apart)


def test_experts_cut_inside_count_as_the_largest_share() -> None:
    """2,048 numbers on 3 ranks in blocks of 128: 768, 640 and 640."""
    model, batch = deepseek_v3(), decode(Layout.TP, 3, 4096, 1)
    found = named(model, batch, 3, experts_cut="inside")["experts"]
    assert found[0].tolist() == [58 * 2 * 4096 * 8 * 3 * 7168 * 768] * 3


@pytest.mark.parametrize("make", [lambda layout: decode(layout, 8, 64, 4096), lambda layout: prefill(layout, 8, 2048)])
def test_tp_and_dp_multiply_the_same_in_all(make) -> None:  # type: ignore[no-untyped-def]
    """Cut by heads or by requests, the ranks' sums agree, but for what TP's ranks each do for all tokens."""
    model = deepseek_v3()
    tp, dp = (named(model, make(layout), 8) for layout in (Layout.TP, Layout.DP))
    for name in ("q_up", "absorb", "mla_decode", "v_up", "expand_kv", "mla_prefill", "o_proj", "experts", "shared_mlp"):
        assert tp[name][0].sum() == pytest.approx(dp[name][0].sum()), name
    assert tp["qkv_a"][0].sum() == pytest.approx(8 * dp["qkv_a"][0].sum())


@pytest.mark.parametrize(
    "layout, tokens, start, rows",
    [
        (Layout.TP, 512, 0, 512),
        (Layout.TP, 300, 0, 320),
        (Layout.DP, 300, 0, 320),
        (Layout.TP, 10, 0, 256),
        (Layout.TP, 2100, 0, 2560),
        (Layout.TP, 512, 64, 640),
        (Layout.TP, 512, 1000, 4096),
        (Layout.TP, 512, 5000, 5512),
    ],
)
def test_captured_steps_expand_contexts_of_few_sizes(layout: Layout, tokens: int, start: int, rows: int) -> None:
    """With blocks of 4,096 rows; beyond it steps are not captured."""
    model, batch = splash_tiny(), prefill(layout, 2, tokens, start)
    plain, captured = (named(model, batch, 2, run_on=run_on, context_block_tokens=4096) for run_on in ("cpu", "gpu"))
    heads = 8 if layout is Layout.DP else 4
    assert captured["expand_kv"][0][0] == 8 * 2 * rows * 64 * heads * 64
    assert plain["expand_kv"][0][0] == 8 * 2 * (start + tokens) * 64 * heads * 64
    assert (captured["mla_prefill"][1] == plain["mla_prefill"][1]).all()


def test_cache_rows_are_read_where_they_lie() -> None:
    """8 requests of 65,536 rows over 8 ranks: TP's ranks read all, the others' an eighth."""
    model = deepseek_v3()
    rows = 61 * 8 * 65536 * row_bytes(model, config(8))
    for layout, share in ((Layout.TP, 1), (Layout.DP, 1 / 8), (Layout.CP, 1 / 8), (Layout.DOP, 1 / 8)):
        found = named(model, decode(layout, 8, 8, 65536), 8)["mla_decode"]
        assert found[1] == pytest.approx(np.full(8, rows * share), rel=0.08), layout
    assert row_bytes(model, config(8)) == 576 * 2
    assert row_bytes(model, config(8, Formats(cache="fp8"))) == 512 + 16 + 128


@pytest.mark.parametrize("formats", [None, Formats(cache="fp8")])
def test_rows_and_shards_are_those_of_the_arena(formats: Formats | None) -> None:
    """The memory map's own arithmetic, which imports what this layer must not."""
    model = deepseek_v3()
    for num_ranks in (3, 8):
        deployment = config(num_ranks, formats)
        assert row_bytes(model, deployment) == stored.row_bytes(model, deployment)
        for spec in (*tensor_specs(model), *tensor_specs(model, "inside")):
            if spec.cut is not Cut.NONE:
                widest = max(end - begin for begin, end in cut_ranges(spec, num_ranks))
                multiple = 128 if spec.cut in (Cut.INTERMEDIATE, Cut.INSIDE_EXPERTS) else 1
                assert largest_share(spec.shape[spec.axis] // spec.stretches, num_ranks, multiple) == widest, spec.name


def test_owners_wait_for_the_fullest() -> None:
    """In DP one rank has 3 of 4 requests: it reads three times as many rows, and gathers are padded to its tokens."""
    batch = decode(Layout.DP, 2, 4, 1000)
    batch.decode_tokens[:] = (3, 1)
    batch.decode_context[:] = (3000, 1000)
    found = named(splash_tiny(), batch, 2)
    assert found["mla_decode"][0][0] == 3 * found["mla_decode"][0][1]
    assert found["mlp_gather"][1].max() == 8 * 3 * 256 * 2


def test_dop_exchanges_queries_and_outputs() -> None:
    """Two tokens on two ranks: every rank sends its half of the heads of the other's token, and gets as much."""
    found = named(splash_tiny(), decode(Layout.DOP, 2, 2, 100), 2)
    assert found["dop_queries"][1].tolist() == [8 * 4 * 80 * 2] * 2
    assert found["dop_outputs"][1].tolist() == [8 * 4 * 64 * 2] * 2
    assert found["dop_queries"][2].tolist() == [8, 8]


def test_cp_sends_queries_with_the_new_row_and_gathers_a_prompt() -> None:
    model = splash_tiny()
    found = named(model, decode(Layout.CP, 2, 2, 1000), 2)
    assert found["cp_queries"][1].tolist() == [8 * 9 * 80 * 2] * 2
    assert found["cp_outputs"][1].tolist() == [8 * 8 * 65 * 4] * 2
    found = named(model, prefill(Layout.CP, 2, 128, 512), 2)
    assert found["context_rows"][1].tolist() == [8 * 320 * 80 * 2] * 2  # each sends half of 640 rows to the other
    assert found["mla_prefill"][0].tolist() == [8 * 2 * 8 * 80 * 64 * (512 + 129 / 2)] * 2
    # A prompt of one page is one rank's.
    assert found["expand_kv"][0][0] == 2 * named(model, prefill(Layout.TP, 2, 128, 512), 2)["expand_kv"][0][0]
    assert named(model, prefill(Layout.CP, 2, 48), 2)["mla_prefill"][0][1] == 0


def test_dop_fetches_what_came_before_a_chunk() -> None:
    found = named(splash_tiny(), prefill(Layout.DOP, 2, 128, 512), 2)
    assert found["context_rows"][1].tolist() == [8 * 512 * 80 * 2] * 2
    assert named(splash_tiny(), prefill(Layout.DOP, 2, 128), 2)["context_rows"][1].tolist() == [0, 0]


def test_an_indexer_bounds_what_is_read_and_scores_everything() -> None:
    plain, sparse = deepseek_v3(), deepseek_v3(indexer=True)
    short, long = (named(sparse, decode(Layout.DP, 8, 8, n), 8) for n in (1024, 16384))
    assert short["mla_decode"][0] == pytest.approx(named(plain, decode(Layout.DP, 8, 8, 1024), 8)["mla_decode"][0])
    assert long["mla_decode"][0][0] == 61 * 2 * 128 * 1088 * 2048
    assert long["index_scores"][0][0] == 61 * 2 * 64 * 128 * 16384
    # TP's ranks all score all of it, CP's each their stripe.
    assert named(sparse, decode(Layout.TP, 8, 8, 16384), 8)["index_scores"][0][0] == 8 * long["index_scores"][0][0]
    assert named(sparse, decode(Layout.CP, 8, 8, 16384), 8)["index_scores"][0][0] == long["index_scores"][0][0]


def test_a_long_prompt_with_an_indexer_attends_to_chosen_rows() -> None:
    model = deepseek_v3(indexer=True)
    short, long = (named(model, prefill(Layout.TP, 8, 1024, start), 8) for start in (0, 65536))
    assert short["mla_prefill"][0][0] > 0 and short["mla_sparse"][0][0] == 0
    assert long["mla_prefill"][0][0] == 0
    assert long["mla_sparse"][0][0] == 61 * 2 * 16 * 1088 * 2048 * 1024
    assert long["absorb"][0][0] == 61 * 2 * 1024 * 16 * 128 * 512


def test_formats_change_what_is_read_not_what_is_multiplied() -> None:
    model = deepseek_v3()
    wide, narrow = (named(model, decode(Layout.DP, 8, 8, 1024), 8, formats) for formats in (None, FP8))
    for name in ("expert_weights", "q_up", "o_proj", "shared_mlp"):
        assert wide[name][0].tolist() == narrow[name][0].tolist()
        assert narrow[name][1][0] == pytest.approx(wide[name][1][0] / 2, rel=0.03), name
    assert wide["head"][1].tolist() == narrow["head"][1].tolist()
