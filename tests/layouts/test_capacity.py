"""Real ranks hold what the capacity says, to the page; what needs one page more is refused in words."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import SPECS, Residency
from splash_trt.llm import LLM
from splash_trt.memory.map import Capacity, memory_map
from splash_trt.models.families import load_config
from splash_trt.orchestrator import Orchestrator
from splash_trt.request import FinishReason, Request, SamplingParams
from tests.oracles.simulated_ranks import Outputs
from tests.oracles.tiny_models import make_model

LAYOUTS = ("tp", "dp", "cp", "dop")
PAGE = 8  # tokens
GRID = pytest.mark.parametrize(("layout", "ranks"), [(name, n) for name in LAYOUTS for n in (1, 2, 3, 4)])
MEMORY = 1_300_123  # bytes; many small pages beside the weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("v3_base", tmp_path_factory.mktemp("model"))


def _llm(folder: Path, layout: str, ranks: int, memory: int, **config: Any) -> LLM:
    config = {"page_tokens": PAGE, "context_block_tokens": 64, "max_running": 16, "dtype": "float32", **config}
    return LLM(folder, layout=layout, ranks=ranks, memory_bytes=memory, **config)


def _memory(folder: Path, layout: str, ranks: int, pages: int) -> int:
    """Bytes with which every rank has at least `pages` pages, and one has no more."""
    model = load_config(folder)
    config = EngineConfig(num_ranks=ranks, page_tokens=PAGE, context_block_tokens=64)
    full = SPECS[Layout.parse(layout)].residency is Residency.FULL
    maps = [memory_map(model, config, rank) for rank in range(ranks)]
    return max(m.pages_offset + (m.others_bytes if full else 0) + pages * m.page_bytes for m in maps)


@dataclass
class Held:
    """What was seen over a run."""

    outputs: Outputs
    least_free: list[int]
    """Per rank."""
    least_free_at_once: int
    """In all ranks together."""
    preempted: bool


def _drive(engine: Orchestrator, max_steps: int = 3000) -> Held:
    """Step until idle. Whoever waits after the first step has been preempted or not been admitted."""
    scheduler, outputs = engine.scheduler, Outputs()
    seen = [scheduler.directory.free_pages()]
    waited = False
    for step in range(max_steps):
        if engine.idle:
            scheduler.check_idle()
            least = np.min(seen, axis=0).tolist()
            return Held(outputs, least, int(min(free.sum() for free in seen)), waited)
        outputs.take(engine.step())
        seen.append(scheduler.directory.free_pages())
        waited |= step > 0 and scheduler.num_waiting > 0
    raise AssertionError(f"not idle after {max_steps} steps")


def _request(name: str, num_tokens: int, new: int) -> Request:
    """num_tokens with its `new` generated ones."""
    prompt = tuple((5 * i + len(name)) % 250 for i in range(num_tokens - new))
    return Request(id=name, prompt=prompt, sampling=SamplingParams(max_tokens=new, ignore_eos=True, temperature=0))


@pytest.fixture
def llm(folder: Path, layout: str, ranks: int) -> Iterator[LLM]:
    with _llm(folder, layout, ranks, _memory(folder, layout, ranks, 8)) as made:
        assert min(made.capacity.pages_per_rank) == 8
        yield made


@GRID
def test_the_longest_request_fits_exactly(llm: LLM, layout: str, ranks: int) -> None:
    """request_tokens long: its last page is its home's last one. One token more gets an answer that says why."""
    engine = llm.orchestrator
    assert engine is not None
    longest = llm.capacity.request_tokens
    engine.add(_request("exact", longest, 3))
    held = _drive(engine)
    assert len(held.outputs.tokens["exact"]) == 3 and held.outputs.error["exact"] is None
    assert not held.preempted and min(held.least_free) == 0

    engine.add(_request("more", longest + PAGE, PAGE + 3))
    held = _drive(engine)
    assert held.outputs.finish["more"] is FinishReason.LENGTH
    assert held.outputs.tokens["more"] == held.outputs.tokens["more"][:3], "more tokens than the cache holds"
    assert str(longest) in (held.outputs.error["more"] or "")
    with pytest.raises(ValueError, match=f"prompt: {longest} tokens.*{longest} tokens of one request"):
        engine.add(_request("never", longest + 1, 1))


def _filling(capacity: Capacity, layout: str) -> list[int]:
    """Final pages of requests that together are all pages: for each rank (or for all of them) one long and one short.

    The short ones come second, and larger ranks' first, so that each goes where its place is.
    """
    pages = capacity.pages_per_rank
    if layout in ("tp", "cp"):
        spread = len(pages) if layout == "cp" else 1
        return [(min(pages) - 4) * spread, 4 * spread]
    base = min(pages) - 4
    return [base] * len(pages) + sorted((count - base for count in pages), reverse=True)


@GRID
def test_all_pages_are_in_use_at_once(llm: LLM, layout: str, ranks: int) -> None:
    """Requests that together have total_pages run side by side; nobody gives way, and not one page stays free.

    All end together: each is admitted a few pages short of its end and grows into the last pages.
    """
    engine = llm.orchestrator
    assert engine is not None
    sizes = _filling(llm.capacity, layout)
    if layout == "cp":
        new = PAGE * ranks + 6
        unfilled = sum(llm.capacity.pages_per_rank) - ranks * min(llm.capacity.pages_per_rank)
    else:
        new = PAGE + 6
        unfilled = 0
        assert sum(sizes) == llm.capacity.total_pages
    for i, pages in enumerate(sizes):
        engine.add(_request(f"r{i}", pages * PAGE, new))
    held = _drive(engine)
    assert not held.preempted
    replicas = sum(llm.capacity.pages_per_rank) - ranks * llm.capacity.total_pages if layout == "tp" else 0
    assert held.least_free_at_once == replicas + unfilled
    assert all(len(held.outputs.tokens[f"r{i}"]) == new for i in range(len(sizes)))
    assert all(error is None for error in held.outputs.error.values())


@pytest.mark.parametrize(("layout", "ranks"), [("tp", 2), ("dp", 3), ("cp", 3), ("dop", 4)])
def test_more_requests_than_fit_all_get_their_answer(llm: LLM, layout: str, ranks: int) -> None:
    """Twice the pages that there are: some wait or give way, and nothing but time is lost."""
    engine = llm.orchestrator
    assert engine is not None
    pages = min(6, llm.capacity.request_pages)
    count = math.ceil(2 * llm.capacity.total_pages / pages)
    for i in range(count):
        engine.add(_request(f"r{i}", pages * PAGE, 2 * PAGE))
    held = _drive(engine)
    assert held.preempted, "the situation did not arise"
    assert len(held.outputs.finish) == count
    assert all(len(tokens) == 2 * PAGE for tokens in held.outputs.tokens.values())
    assert all(error is None for error in held.outputs.error.values())


def _head_bytes(folder: Path) -> list[int]:
    """Bytes of one head of every head-cut tensor of the file, in float32: q, the two halves of kv_b, and o."""
    heads, nope, value = 4, 24, 20
    found = []
    with safe_open(folder / "model.safetensors", "np") as file:
        for key in file.keys():
            rows, columns = (*file.get_slice(key).get_shape(), 1)[:2]
            if key.endswith(("q_b_proj.weight", "q_proj.weight")):
                found.append(rows // heads * columns * 4)
            elif key.endswith("kv_b_proj.weight"):
                assert rows == heads * (nope + value)
                found += [nope * columns * 4, value * columns * 4]
            elif key.endswith("o_proj.weight"):
                found.append(rows * columns // heads * 4)
    assert len(found) == 4 * 3
    return found


def _share(total: int, rank: int, ranks: int) -> int:
    """Of `total` things dealt out in turn; cut into blocks they are as many."""
    return len(range(rank, total, ranks))


def _own_bytes(folder: Path, rank: int, ranks: int) -> int:
    """This rank's share of every tensor of the file in float32, each aligned; uncut ones whole."""
    total = 0

    def add(numbers: int) -> None:
        nonlocal total
        total += math.ceil(numbers * 4 / 256) * 256

    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    experts: dict[str, int] = {}
    for key, shape in shapes.items():
        rows, columns = (*shape, 1)[:2]
        if ".experts." in key:  # all experts of a layer are one tensor; gate and up together
            layer, kind = key.split(".mlp.")[0], "down" if "down_proj" in key else "gate_up"
            experts[f"{layer}.{kind}"] = experts.get(f"{layer}.{kind}", 0) + (
                rows * columns if int(key.split(".experts.")[1].split(".")[0]) < _share(8, rank, ranks) else 0
            )
        elif key.endswith(("embed_tokens.weight", "lm_head.weight")):
            add(_share(rows, rank, ranks) * columns)
        elif key.endswith("q_b_proj.weight"):
            add(rows // 4 * _share(4, rank, ranks) * columns)
        elif key.endswith("kv_b_proj.weight"):
            add(_share(4, rank, ranks) * 24 * columns)
            add(_share(4, rank, ranks) * 20 * columns)
        elif key.endswith("o_proj.weight"):
            add(rows * columns // 4 * _share(4, rank, ranks))
        elif key.endswith("gate_proj.weight"):
            add(2 * _share(rows, rank, ranks) * columns)
        elif key.endswith("down_proj.weight"):
            add(rows * _share(columns, rank, ranks))
        elif not key.endswith("up_proj.weight"):
            add(rows * columns)
    for numbers in experts.values():
        add(numbers)
    return total


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_what_is_not_replicated_is_given_to_the_cache(folder: Path, ranks: int) -> None:
    """DOP holds more than DP by the other ranks' heads, TP more than CP likewise, in whole pages."""
    found = {}
    for layout in LAYOUTS:
        with _llm(folder, layout, ranks, MEMORY, page_tokens=4) as llm:
            found[layout] = llm.capacity.pages_per_rank
    assert found["tp"] == found["dop"] and found["cp"] == found["dp"]
    page = 3 * 4 * (32 + 16) * 4
    for rank in range(ranks):
        mine = _share(4, rank, ranks)
        others = sum(math.ceil((4 - mine) * head / 256) * 256 for head in _head_bytes(folder))
        more = found["dop"][rank] - found["dp"][rank]
        assert abs(more - others / page) < 1, (rank, more, others / page)
        assert more == 0 if ranks == 1 else more > 10


@GRID
def test_nearly_all_memory_is_in_use(folder: Path, layout: str, ranks: int) -> None:
    """Workspaces, weights and pages take at least 98 % of the arena on every rank; the rest is less than a page."""
    with _llm(folder, layout, ranks, MEMORY, page_tokens=4) as llm:
        pages = llm.capacity.pages_per_rank
        assert llm.orchestrator is not None
        pools = llm.orchestrator.scheduler.directory.pools
        assert tuple(pool.limit for pool in pools) == pages
        workspace = math.ceil(64 * 48 * 4 / 256) * 256 + math.ceil(64 * 4 * (24 + 20) * 4 / 256) * 256
        for rank in range(ranks):
            own = _own_bytes(folder, rank, ranks)
            mine = _share(4, rank, ranks)
            others = sum(math.ceil((4 - mine) * head / 256) * 256 for head in _head_bytes(folder))
            used = workspace + own + (others if layout in ("dp", "cp") else 0) + pages[rank] * 3 * 4 * 48 * 4
            assert 0.98 * MEMORY <= used <= MEMORY, (rank, used / MEMORY)


@GRID
def test_too_little_memory_is_refused_before_any_rank_starts(folder: Path, layout: str, ranks: int) -> None:
    threads = threading.active_count()
    with pytest.raises(ValueError) as caught:
        _llm(folder, layout, ranks, 50_000)
    text = str(caught.value)
    assert "memory_bytes: 50000" in text and f"layout {layout}" in text and "rank 0" in text
    shortfall = int(text.split()[-2])
    assert 0 < shortfall < 2_000_000
    assert threading.active_count() == threads
