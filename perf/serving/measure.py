"""Tokens/s, time to first token and time per token of `splash-trt serve`: `python -m perf.serving.measure --help`.

One server, with random weights and uniform random routing, serves every case under every layout in turn (pinned), then
under auto. cache_tokens: how many tokens a layout's cache holds, over all ranks. Writes
perf/results/serving/<name>.{json,md,png}.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from perf import harness, report
from perf.floor import Floor
from perf.serving import deployment, load
from perf.serving.load import Case
from perf.serving.server import MODEL_NAME, Server
from splash_trt.config import Layout

CASES = ("1x512x128x8", "16x512x128x96", "128x512x128x768", "512x512x128x2048", "1x15000x16x6")
VIEW = harness.View(x="clients", y="tokens_per_s", series="layout", panels=("prompt", "output"))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m perf.serving.measure")
    deployment.add_options(parser)
    parser.add_argument("--cases", type=Case.parse, nargs="+", default=[Case.parse(text) for text in CASES],
                        metavar="CLIENTSxPROMPTxOUTPUTxREQUESTS")  # fmt: skip
    parser.add_argument("--warmup", type=Case.parse, default=Case.parse("8x64x16x16"),
                        metavar="CASE", help="run before each layout's cases, not counted")  # fmt: skip
    return parser.parse_args(arguments)


def floors(floor: Floor | None, layout: str, case: Case) -> harness.Row:
    """The least times per output token and to the first token that a case could have, and the expected number of
    distinct experts used in a layer."""
    if floor is None:
        return {}
    layouts = [Layout.parse(layout)] if layout != deployment.AUTO else list(Layout)
    context = case.prompt + case.output // 2
    return {
        "floor_tpot_ms": round(min(floor.decode_ms(one, case.clients, context) for one in layouts), 3),
        "floor_ttft_ms": round(min(floor.prefill_ms(one, case.prompt) for one in layouts), 3),
        "experts_hit": round(floor.experts_hit(case.clients), 1),
    }


def run_cases(
    server: Server, cases: Sequence[Case], warmup: Case, vocab_size: int, layout: str, processes: int
) -> list[harness.Row]:
    server.go_to(layout)
    room: harness.Row = {"cache_tokens": server.cache_tokens(layout)}
    rows = []
    for number, case in enumerate([warmup, *cases]):
        found = load.figures(
            load.run(
                server.url,
                MODEL_NAME,
                vocab_size,
                case.wishes(),
                clients=case.clients,
                processes=processes,
                seed=number,
            )
        )
        server.wait_until_idle()
        rows.append({"layout": layout, **_sizes(case), **found, **room})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _sizes(case: Case) -> harness.Row:
    return {"clients": case.clients, "prompt": case.prompt, "output": case.output, "requests": case.requests}


def all_told(rows: Sequence[harness.Row], counted: int) -> str:
    """The check: every stream had the tokens that were asked for, and the server counted as many. AssertionError if
    not."""
    failed = sum(int(row["failed"] or 0) for row in rows)
    asked = sum(int(row["requests"] or 0) * int(row["output"] or 0) for row in rows)
    assert failed == 0, f"{failed} streams failed"
    assert counted == asked, f"the server counts {counted} output tokens, its clients {asked}"
    return f"{asked} tokens in {sum(int(row['requests'] or 0) for row in rows)} streams, the server counts as many"


def result_of(
    options: argparse.Namespace,
    arguments: Sequence[str],
    floor: Floor | None,
    measured: Sequence[harness.Row],
    told: int,
) -> harness.Result:
    """The result for the layouts measured so far. told: the number of tokens that the server has counted."""
    room = {str(row["layout"]): row["cache_tokens"] for row in measured}
    tokens = ", ".join(f"{layout} {count:,}" for layout, count in room.items() if count is not None)
    rows = []
    for layout in room:
        mine = [row for row in measured if row["layout"] == layout][1:]  # the first is the warm-up
        rows += [row | floors(floor, layout, case) for row, case in zip(mine, options.cases, strict=True)]
    what = "streams have the tokens that were asked for"
    return harness.Result(
        schema=harness.SCHEMA_VERSION,
        area="serving",
        name=options.name or "clients",
        title="What closed-loop clients see",
        provenance=deployment.provenance(options, "perf.serving.measure", list(arguments), room),
        check=harness.checked(what, lambda: f"{all_told(measured, told)}; tokens of cache: {tokens}"),
        view=VIEW,
        rows=rows,
    )


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    model = deployment.model_of(options)
    floor = deployment.floor_of(options, model)
    measured: list[harness.Row] = []
    with deployment.server(options) as server:
        before = server.settled_output_tokens() if options.at else 0
        for layout in options.layouts:
            measured += run_cases(server, options.cases, options.warmup, model.vocab_size, layout, options.processes)
            asked = sum(int(row["requests"] or 0) * int(row["output"] or 0) for row in measured)
            counted = server.output_tokens(at_least=before + asked) - before
            result = result_of(options, arguments, floor, measured, counted)
            if result.check.passed:  # kept, whatever happens later
                report.publish(result, options.results)
    print(report.markdown(result))
    report.publish(result, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
