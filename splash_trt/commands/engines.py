"""`splash-trt build` and `splash-trt inspect`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from splash_trt.commands.plans import build_plans, build_plans_only, check_out, plan_options
from splash_trt.options import or_fail


@click.command("build")
@click.option("--model", type=click.Path(path_type=Path), required=True, help="Hugging Face folder to build from.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to make.")
@click.option("--self-contained", is_flag=True, help="Copy the experts too instead of referring to the checkpoint.")
@click.option("--overwrite", is_flag=True, help="Replace an engine that is already there.")
@plan_options
def build_command(model: Path, out: Path, self_contained: bool, overwrite: bool, plans: dict[str, Any]) -> None:
    """Make an engine: one folder for any number of ranks and every layout."""
    from splash_engines.build import build_engine

    check_out(out, plans["plans_only"], overwrite)
    extra_files = build_plans(model, plans)
    if extra_files is not None and plans["plans_only"]:
        build_plans_only(extra_files, out, overwrite)
        click.echo(f"Built {out}")
        return
    with _bar(f"Building {out.name}") as progress:
        kinds = {"self_contained": self_contained, "overwrite": overwrite}
        or_fail(lambda: build_engine(model, out, extra_files=extra_files, progress=progress, **kinds))
    click.echo(f"Built {out}")


@click.command("inspect")
@click.argument("engine", type=click.Path(path_type=Path), required=False)
@click.option("--verify", is_flag=True, help="Read all weights and plans, and hold them against their checksums.")
@click.option("--ops", is_flag=True, help="Say which implementation of each operation this machine uses, and why.")
@click.option("--tokens", type=click.IntRange(min=1), default=8, show_default=True, help="With --ops: of a step.")
def inspect_command(engine: Path | None, verify: bool, ops: bool, tokens: int) -> None:
    """Say what an engine holds. With --ops, what would run it; then ENGINE is DeepSeek-V3.2's sizes by default."""
    from splash_engines.inspect_engine import format_inspection, inspect_engine
    from splash_engines.manifest import MANIFEST
    from splash_engines.tensorrt.store import describe_plans, has_plans

    if ops and verify:
        raise click.UsageError("--verify is of an engine's files, and --ops of what would run them; give one of them")
    if ops:
        _echo_operations(engine, tokens)
    elif engine is None:
        raise click.UsageError("Missing argument 'ENGINE'.")
    else:
        plans_alone = has_plans(engine) and not (engine / MANIFEST).exists()
        if plans_alone:
            click.echo(f"plans                 {describe_plans(engine)}\n(plans alone: no weights, nothing to serve)")
        else:
            click.echo(format_inspection(or_fail(lambda: inspect_engine(engine))))
        if verify:
            _verify(engine, plans_alone)


def _echo_operations(engine: Path | None, tokens: int) -> None:
    from splash_engines.inspect_operations import DEEPSEEK_EXPERTS, DEEPSEEK_V3_2, format_operations, sizes_of
    from splash_engines.kernels_reference import REFERENCE
    from splash_engines.open import open_engine
    from splash_engines.operations import this_machine

    machine, kernels = this_machine(), REFERENCE
    if machine.gpu is not None:
        from splash_engines.kernels_cuda import CUDA

        kernels = CUDA
    sizes, experts = DEEPSEEK_V3_2, DEEPSEEK_EXPERTS
    if engine is not None:
        model = or_fail(lambda: open_engine(engine)).model
        sizes, experts = sizes_of(model), model.experts
    click.echo(format_operations(machine, kernels, sizes, experts, tokens))


def _verify(engine: Path, plans_alone: bool) -> None:
    """Prints that all weights and plans are as they were built, or fails."""
    from splash_engines.open import verify_engine
    from splash_engines.tensorrt.store import has_plans, verify_plans

    found = []
    if not plans_alone:
        with _bar(f"Reading {engine.name}") as progress:
            or_fail(lambda: verify_engine(engine, progress=progress))
        found.append("every number")
    if has_plans(engine):
        found.append(f"all {or_fail(lambda: verify_plans(engine))} plans")
    click.echo(f"verified              as built: {', '.join(found)}")


@contextmanager
def _bar(label: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar; yields a callback of the type splash_engines.open.Progress."""
    with click.progressbar(length=1, label=label, file=sys.stderr) as bar:

        def progress(what: str, done: int, total: int) -> None:
            bar.length = max(1, total)
            bar.update(done - bar.pos)

        yield progress
