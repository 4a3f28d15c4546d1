"""Where a decode step's time goes, on ranks that are threads: `python -m perf.engines.profile_step --ranks 4 …`.

Ranks take turns in one process, so the times of all of them add up, and waiting costs nothing. Prints a table of torch
operators by their own time, and tables of rank 0's Python functions by their own and by their total time. All are over
--steps steps and one to warm up.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
from collections.abc import Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from perf.engines.bench import Bench, bench_config
from perf.engines.step_ranks import CONFIGS
from perf.harness import summary
from splash_trt.config import Layout
from splash_trt.dist.world import ThreadWorld, World
from splash_trt.models.families import load_config


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m perf.engines.profile_step")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layouts", nargs="+", default=["tp"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=20)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    folder = CONFIGS / "small"
    tokens = options.batch * (options.context + options.batch)
    config = bench_config(
        load_config(folder),
        num_ranks=options.ranks,
        dtype=options.dtype,
        cache_tokens=tokens,
        max_running=options.batch,
    )

    def program(world: World) -> None:
        bench = Bench(world, folder, config)
        if world.rank:
            bench.follow()
            return
        for name in options.layouts:
            _profile(bench, Layout.parse(name), options)
        bench.release()

    ThreadWorld(options.ranks, 300.0).run(program)
    return 0


def _profile(bench: Bench, layout: Layout, options: argparse.Namespace) -> None:
    def block() -> list[float]:
        return bench.decode(layout, batch=options.batch, context=options.context, steps=options.steps, warmup=1)

    plain = summary([block()])
    print(f"== {layout.name.lower()}, {options.ranks} ranks as threads: {plain['median_ms']:.1f} ms a step")
    with profile(activities=[ProfilerActivity.CPU]) as operators:
        block()
    print(operators.key_averages().table(sort_by="self_cpu_time_total", row_limit=options.rows))
    python = cProfile.Profile()
    python.runcall(block)
    for order in ("tottime", "cumulative"):
        pstats.Stats(python).strip_dirs().sort_stats(order).print_stats(options.rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
