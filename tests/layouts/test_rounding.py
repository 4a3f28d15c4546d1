"""float32 and bfloat16: as near to the float64 oracle as their rounding allows, in every layout.

Rounding moves a router's scores too, and a token whose choice of experts tips over may get any other distribution, as
may the tokens that attend to it. So positions are judged by `Oracle.router_gaps`, the least margin of any choice that
a position depends on.
"""

from __future__ import annotations

import pytest
import torch

from splash_trt.request import Completion
from tests.layouts.harness import LAYOUTS, Models, differences, greedy, random_prompts, serve
from tests.oracles.tiny_models import VARIANTS
from tests.oracles.transformers_float64 import load_model

LENGTHS = (1, 7, 8, 9, 2, 43, 16, 23)
OUTPUTS = (8, 5, 6, 8, 9, 7, 3, 8)

# float32. Measured over all variants and layouts: median 1.7e-6, largest 1.4e-5.
FLOAT32_BOUND = 1e-4
FLOAT32_TIE = 2e-5  # router scores are at most a few units and carry errors of a few 1e-6

# bfloat16. Measured on BFLOAT16_NAMES: medians 0.022 to 0.034; largest 0.14 where no choice was within BFLOAT16_TIE,
# and 1.5 elsewhere. Log-probabilities here reach -40, and bfloat16 keeps 8 bits.
BFLOAT16_NAMES = ("v3_half_rope", "v2_greedy", "glm_base")
BFLOAT16_MEDIAN = 0.06
BFLOAT16_BOUND = 0.3
BFLOAT16_TIE = 0.02


def run(models: Models, name: str, layout: str, ranks: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(difference, router gap), each [positions reported] float64, of a batch of chunks and decodes."""
    batch = (random_prompts(LENGTHS), [greedy(n) for n in OUTPUTS])
    (result,) = serve(
        models.folder(name),
        [batch],
        ranks=ranks,
        layout=layout,
        dtype=dtype,
        page_tokens=8,
        max_running=8,
        max_batch_tokens=12,
        context_block_tokens=20,
    )
    assert [len(c.tokens) for c in result.completions] == list(OUTPUTS)
    found = torch.cat([differences(models, name, completion) for completion in result.completions])
    return found, torch.cat([gaps(models, name, completion) for completion in result.completions])


def gaps(models: Models, name: str, completion: Completion) -> torch.Tensor:
    return models.oracle(name).router_gaps([*completion.prompt, *completion.tokens])[:-1]


@pytest.mark.parametrize(
    ("name", "layout", "ranks"),
    [(name, LAYOUTS[i % 4], 1 + (i + i // 4 + 1) % 4) for i, name in enumerate(VARIANTS)],
)
def test_float32(models: Models, name: str, layout: str, ranks: int) -> None:
    found, gap = run(models, name, layout, ranks, "float32")
    clear = gap >= FLOAT32_TIE
    assert clear.sum() >= 0.75 * len(clear), "too many router ties for the comparison to mean much"
    assert float(found[clear].max()) < FLOAT32_BOUND
    assert float(found.median()) > 1e-8, "this is not float32"


def check_bfloat16(models: Models, name: str, layout: str, ranks: int) -> None:
    found, gap = run(models, name, layout, ranks, "bfloat16")
    clear = gap >= BFLOAT16_TIE
    assert clear.sum() >= 10, "too few positions without a router tie"
    assert float(found[clear].max()) < BFLOAT16_BOUND
    assert 1e-3 < float(found.median()) < BFLOAT16_MEDIAN


@pytest.mark.parametrize(("layout", "ranks"), [("tp", 2), ("dp", 2), ("cp", 3), ("dop", 3)])
def test_bfloat16(models: Models, layout: str, ranks: int) -> None:
    check_bfloat16(models, BFLOAT16_NAMES[0], layout, ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("name", BFLOAT16_NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_in_every_case(models: Models, layout: str, ranks: int, name: str) -> None:
    check_bfloat16(models, name, layout, ranks)


@pytest.mark.parametrize("name", BFLOAT16_NAMES[:2])
def test_bfloat16_is_as_good_as_transformers(models: Models, name: str) -> None:
    """The bound above is no excuse for lost bits: transformers in bfloat16 errs as much."""
    model = load_model(models.folder(name), torch.bfloat16)
    theirs = []
    for ids in random_prompts([40] * 4, seed=5):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
        wanted = torch.tensor(ids[1:])[:, None]
        want = models.logprobs(name, ids)[:-1].gather(1, wanted)
        theirs.append((torch.log_softmax(logits, dim=-1)[:-1].gather(1, wanted) - want).abs())
    median = float(torch.cat(theirs).median())
    ours, _ = run(models, name, "dop", 2, "bfloat16")
    assert float(ours.median()) < 1.5 * median, (float(ours.median()), median)
