"""One rank's program of the step benchmark; step_time.py starts it, under mpirun or, for one rank, alone.

Arguments: a JSON file with Settings, and the file to which rank 0 writes its Findings.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
import torch

from perf.engines.bench import CONFIGS, Bench, bench_config, model_folder
from perf.harness import Row, interleave, ratio, summary
from splash_trt import environment
from splash_trt.config import Layout
from splash_trt.dist.place import run_on_of
from splash_trt.dist.world import ThreadWorld, World
from splash_trt.launch import run_under_mpi
from splash_trt.models.families import load_config

CHECK_PROMPTS = (1, 5, 33, 64, 130, 200)  # tokens
CHECK_TOKENS = 12


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    ranks: int
    run_on: str
    """As in EngineConfig."""
    model: str
    """The name of a folder in perf/configs, or the path of another folder."""
    simulate_routing: str
    """As in EngineConfig."""
    experts_cut: str
    """As in EngineConfig."""
    check_dtype: str
    layouts: tuple[str, ...]
    dtypes: tuple[str, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    max_cache_tokens: int
    """Cells (batch and context) with more tokens in all are left out."""
    rounds: int
    steps: int
    """Steps of each layout in each round; fewer if they take long (round_s)."""
    warmup_steps: int
    round_s: float
    """If the steps of a round would take a layout longer than this, a cell gets fewer of them, but at least two."""
    prompts: tuple[int, ...]
    """The lengths in tokens of the prompts whose prefill is measured."""
    max_batch_tokens: int


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    decode: list[Row]
    prefill: list[Row]
    tokens: dict[str, list[list[int]]]
    """The greedy continuations that the check compares, by layout."""


def measure(world: World, settings: Settings) -> Findings:
    """Called on every rank; only rank 0's findings count."""
    torch.set_num_threads(1)
    layouts = [Layout.parse(name) for name in settings.layouts]
    tokens = check(world, layouts, settings.check_dtype, settings.experts_cut)
    decode: list[Row] = []
    prefill: list[Row] = []
    for dtype in settings.dtypes:
        begin = time.monotonic()
        folder = model_folder(settings.model)
        model = load_config(folder)
        config = bench_config(
            model,
            num_ranks=world.size,
            dtype=dtype,
            cache_tokens=settings.max_cache_tokens,
            max_running=max(settings.batches),
            max_batch_tokens=settings.max_batch_tokens,
            run_on=run_on_of(world),
            simulate_routing=settings.simulate_routing,
            experts_cut=settings.experts_cut,
        )
        bench = Bench(world, folder, config)
        if world.rank:
            bench.follow()
            continue
        _say(f"N={world.size} {dtype}: weights made in {time.monotonic() - begin:.0f} s")
        for context in settings.contexts:
            for batch in settings.batches:
                if batch * context <= settings.max_cache_tokens:
                    decode += _decode_cell(bench, layouts, batch, context, settings)
        for prompt in settings.prompts:
            prefill += _prefill_cell(bench, layouts, prompt, settings)
        bench.release()
    return Findings(decode=decode, prefill=prefill, tokens=tokens)


def check(
    world: World, layouts: list[Layout], dtype: str, experts_cut: str = "whole"
) -> dict[str, list[list[int]]]:
    """Greedy continuations of a tiny model by layout; on rank 0, others return nothing."""
    model = load_config(CONFIGS / "tiny")
    config = bench_config(
        model,
        num_ranks=world.size,
        dtype=dtype,
        cache_tokens=4096,
        max_batch_tokens=96,
        page_tokens=16,
        run_on=run_on_of(world),
        experts_cut=experts_cut,
    )
    bench = Bench(world, CONFIGS / "tiny", config)
    if world.rank:
        bench.follow()
        return {}
    prompts = [[(7 * n + 13 * i) % model.vocab_size for i in range(n)] for n in CHECK_PROMPTS]
    tokens = {layout.name.lower(): bench.greedy(layout, prompts, CHECK_TOKENS) for layout in layouts}
    bench.release()
    return tokens


def _decode_cell(bench: Bench, layouts: list[Layout], batch: int, context: int, settings: Settings) -> list[Row]:
    first = {layout: bench.decode(layout, batch=batch, context=context, steps=1, warmup=1) for layout in layouts}
    steps = max(2, min(settings.steps, int(settings.round_s / max(times[0] for times in first.values()))))

    idle: dict[str, list[float]] = {layout.name.lower(): [] for layout in layouts}

    def sample(layout: Layout) -> list[float]:
        times = bench.decode(layout, batch=batch, context=context, steps=steps, warmup=settings.warmup_steps)
        idle[layout.name.lower()].append(bench.idle)
        return times

    variants = {layout.name.lower(): partial(sample, layout) for layout in layouts}
    rounds = interleave(variants, warmup=0, repeats=settings.rounds)
    rows = _rows(bench, rounds, batch, {"context": context, "batch": batch})
    for row in rows:
        row["idle"] = round(median(idle[str(row["layout"])]), 4)
    _say(_line(rows, f"context {context:5d} batch {batch:3d}"))
    return rows


def _prefill_cell(bench: Bench, layouts: list[Layout], prompt: int, settings: Settings) -> list[Row]:
    def sample(layout: Layout) -> list[float]:
        return bench.prefill(layout, prompt)

    for layout in layouts:
        if settings.run_on != "cpu":  # the first run compiles, the second one is captured
            bench.prefill(layout, prompt)
            bench.prefill(layout, prompt)
        else:
            bench.prefill(layout, 64)
    variants = {layout.name.lower(): partial(sample, layout) for layout in layouts}
    rounds = interleave(variants, warmup=0, repeats=settings.rounds)
    rows = _rows(bench, rounds, prompt, {"prompt": prompt})
    _say(_line(rows, f"prompt {prompt}"))
    return rows


def _rows(bench: Bench, rounds: dict[str, list[list[float]]], tokens: int, cell: Row) -> list[Row]:
    """A row for each layout. tokens: how many are computed in each sample."""
    base = next(iter(rounds))
    rows: list[Row] = []
    for layout, samples in rounds.items():
        found = summary(samples)
        rows.append(
            {
                "dtype": bench.config.dtype,
                "ranks": bench.config.num_ranks,
                **cell,
                "layout": layout,
                **{name: round(value, 4) for name, value in found.items()},
                "tokens_per_s": round(tokens / found["median_ms"] * 1e3, 1),
                f"ratio_to_{base}": round(ratio(samples, rounds[base]), 4),
            }
        )
    return rows


def _line(rows: list[Row], cell: str) -> str:
    told = [f"{row['layout']} {row['median_ms']:.2f} ms" for row in rows]
    idle = max((float(row["idle"] or 0) for row in rows if "idle" in row), default=None)
    return f"  {cell}: {', '.join(told)}" + ("" if idle is None else f"; device idle {idle:.1%} at most")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> None:
    settings = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Settings)
    out = Path(arguments[1])

    def program(world: World) -> int:
        findings = measure(world, settings)
        if world.rank == 0:
            out.write_bytes(msgspec.json.encode(findings))
        return 0

    if environment.under_mpirun():
        run_under_mpi(program, 300.0, run_on=settings.run_on)
    ThreadWorld(settings.ranks, 300.0).run(program)


if __name__ == "__main__":
    main(sys.argv[1:])
