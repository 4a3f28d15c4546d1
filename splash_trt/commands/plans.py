"""`splash-trt build --engine tensorrt`: its options, and the building of plans, which precedes that of the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from splash_trt.config import FORMAT_ALIASES, PLAN_DTYPES, format_of
from splash_trt.options import or_fail

DEFAULT_CACHE = Path("~/.cache/splash-trt/plans")
OF_PLANS = "With --engine tensorrt: "

ExtraFiles = Callable[[Path], list[Any]]
"""Writes files into an engine's folder and returns their entries for its manifest."""

_OPTIONS = (
    click.option(
        "--engine", type=click.Choice(["torch", "tensorrt"]), default="torch", show_default=True,
        help="What will run the dense parts of a step: torch needs nothing built, tensorrt a plan for each segment.",
    ),
    click.option("--target", help=OF_PLANS + "GPUs, such as sm_89,sm_120.  [default: the one of this machine]"),
    click.option("--ranks", default="1,2,4", show_default=True, help=OF_PLANS + "numbers of ranks to serve on."),
    click.option("--layouts", default="tp,dp,cp,dop", show_default=True, help=OF_PLANS + "layouts to serve."),
    click.option("--dtype", type=click.Choice([*FORMAT_ALIASES, *PLAN_DTYPES]),
                 help=OF_PLANS + "of the networks.  [default: model's]"),
    click.option("--max-batch-tokens", type=click.IntRange(min=1), default=8192, show_default=True,
                 help=OF_PLANS + "most tokens of a step."),
    click.option("--page-tokens", type=click.IntRange(min=1), default=64, show_default=True,
                 help=OF_PLANS + "tokens of a cache page, for attention as networks."),
    click.option("--form", type=click.Choice(["plugin", "primitive"]),
                 help=OF_PLANS + "attention and experts between the networks, or as networks (small models)."
                 "  [default: by the model's size]"),
    click.option("--collectives", type=click.Choice(["border", "network"]), default="border", show_default=True,
                 help=OF_PLANS + "sums over ranks between the networks, or DistCollective layers in them."),
    click.option("--plans-only", is_flag=True, help=OF_PLANS + "make a folder of plans alone; needs config.json only."),
    click.option("--plan-cache", type=click.Path(path_type=Path), default=DEFAULT_CACHE, show_default=True,
                 help=OF_PLANS + "folder of plans already built."),
)  # fmt: skip


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options to a command, which gets them as one dict, `plans`."""

    def wrapped(**given: Any) -> Any:
        plans = {name: given.pop(name) for name in names}
        return command(plans=plans, **given)

    names = []
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    for parameter in wrapped.__click_params__:  # type: ignore[attr-defined]
        names.append(parameter.name)
    wrapped.__doc__ = command.__doc__
    wrapped.__click_params__ += getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    return wrapped


def build_plans(model_dir: Path, options: dict[str, Any]) -> ExtraFiles | None:
    """Build the plans that --engine tensorrt asks for, with a progress bar; None for --engine torch."""
    if options["engine"] == "torch":
        for name in ("target", "dtype", "form", "plans_only"):
            if options[name]:
                raise click.UsageError(f"--{name.replace('_', '-')} is of plans, which --engine tensorrt builds")
        return None
    from splash_engines.tensorrt.build import build_for_checkpoint
    from splash_engines.tensorrt.store import write_plans
    from splash_engines.trt_api import BuildFailure

    try:
        cache, built = _with_bar(lambda progress: or_fail(lambda: build_for_checkpoint(
            model_dir,
            targets=_words(options["target"]),
            ranks=_words(options["ranks"]),
            layouts=_words(options["layouts"]),
            dtype=options["dtype"] and format_of(options["dtype"]),
            max_batch_tokens=options["max_batch_tokens"],
            page_tokens=options["page_tokens"],
            form=options["form"],
            collectives_in=options["collectives"] == "network",
            cache=options["plan_cache"].expanduser(),
            progress=progress,
        )))  # fmt: skip
    except BuildFailure as error:
        raise click.ClickException(str(error)) from error
    plans = built.plans
    size = sum(plan.num_bytes for plan in plans.plans.values())
    new = sum(seconds for key, seconds in built.seconds.items() if key not in built.cached)
    click.echo(
        f"{len(plans.plans)} plans by {plans.builder} for {', '.join(plans.settings.targets)}: {size / 1e6:.1f} MB, "
        f"{len(built.cached)} of them from the cache, the others built in {new:.1f} s"
    )
    return lambda folder: write_plans(plans, cache, folder)


def check_out(out: Path, plans_only: bool, overwrite: bool) -> None:
    """Fails if `out` cannot be written to: checked first, since building plans takes minutes."""
    from splash_engines.build import MARKERS
    from splash_engines.tensorrt.store import MARKERS as OF_PLANS_ONLY
    from splash_engines.whole_folder import check_target

    or_fail(lambda: check_target(out.resolve(), OF_PLANS_ONLY if plans_only else MARKERS, overwrite))


def build_plans_only(extra_files: ExtraFiles, out: Path, overwrite: bool) -> None:
    """Make a folder that holds plans and nothing else."""
    from splash_engines.tensorrt.store import MARKERS
    from splash_engines.whole_folder import whole_folder

    def build() -> None:
        with whole_folder(out.resolve(), markers=MARKERS, overwrite=overwrite) as folder:
            extra_files(folder)

    or_fail(build)


def _with_bar(act: Callable[[Callable[[str, float], None]], Any]) -> Any:
    steps = 1000
    with click.progressbar(
        length=steps, label="Building plans", file=sys.stderr, item_show_func=lambda kind: kind or ""
    ) as bar:

        def progress(kind: str, done: float) -> None:
            bar.update(max(0, int(done * steps) - bar.pos), kind)

        return act(progress)


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())
