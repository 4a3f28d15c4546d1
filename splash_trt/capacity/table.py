"""The capacity report as text."""

from __future__ import annotations

from collections.abc import Sequence

from splash_trt.capacity.report import OTHERS, Case, LayoutRoom

Row = Sequence[str]

TITLES = {
    "experts": "experts",
    "dense_and_shared_mlps": "dense and shared MLPs",
    "attention_resident": "attention, the rank's heads",
    OTHERS: "attention, the other ranks' heads (DP and CP)",
    "replicated": "on every rank: latents, indexer, router, norms",
    "embedding_and_head": "embedding and head",
}


def format_assumptions(assumptions: dict[str, str]) -> str:
    return _columns([(name.replace("_", " "), text) for name, text in assumptions.items()])


def format_count(number: int) -> str:
    """A count in short form, such as 671.0 B, 10.4 M or 31.2 K."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def format_case(case: Case, page_tokens: int) -> str:
    stored = case.formats
    title = f"Attention in {stored['attention']}, other weights in {stored['weights']}, cache in {stored['cache']}"
    parts = [title, "-" * len(title), _weights(case), _cache(case, page_tokens)]
    if case.layouts[0].batches:
        parts.append(_batches(case.layouts))
    return "\n\n".join(["\n".join(parts[:2]), *parts[2:]])


def _weights(case: Case) -> str:
    """The table of bytes per rank, of each kind: on the rank that holds most, and on the one that holds least."""
    rows: list[Row] = [("Bytes on a rank", "most", "least")]
    for kind, title in TITLES.items():
        held = [by_kind[kind] for by_kind in case.weights_bytes]
        rows.append((title, f"{max(held):,}", f"{min(held):,}"))
    rows.append(("workspace (a block of context rows, expanded)", *[f"{case.workspace_bytes:,}"] * 2))
    rows.append((f"a page of the cache ({case.row_bytes} a token and layer)", *[f"{case.page_bytes:,}"] * 2))
    return _columns(rows, numbers_from=1)


def _cache(case: Case, page_tokens: int) -> str:
    rows: list[Row] = [("Cache, in tokens", "in total", "rank with most", "with least", "longest request")]
    for room in case.layouts:
        held = room.tokens_per_rank
        figures = (room.total_tokens, max(held, default=0), min(held, default=0), room.request_tokens)
        rows.append((room.layout, *(f"{figure:,}" for figure in figures)))
    lines = [_columns(rows, numbers_from=1)]
    lines += [f"{room.layout}: no room: {room.no_room}" for room in case.layouts if room.no_room]
    if case.dop_over_dp_percent is not None:
        lines.append(f"DOP holds {case.dop_over_dp_percent:.1f} % more than DP")
    if case.dop_over_tp is not None:
        lines.append(f"DOP holds {case.dop_over_tp:.2f} times what TP does")
    lines.append(f"(whole pages of {page_tokens} tokens; in TP every rank holds the same tokens)")
    return "\n".join(lines)


def _batches(layouts: Sequence[LayoutRoom]) -> str:
    rows: list[Row] = [("Requests held at once", *(room.layout for room in layouts))]
    for index, batch in enumerate(layouts[0].batches):
        asked = f"{batch.lengths.prompt:,} + {batch.lengths.output:,} tokens"
        batches = [room.batches[index] for room in layouts]
        rows.append((f"{asked}, all at full length", *(f"{b.full_length:,}" for b in batches)))
        rows.append((f"{asked}, at mean length", *(f"{b.mean_length:,}" for b in batches)))
    notes = "(placed as well as can be; mean length: each at a random one of its output tokens; no other limit counted)"
    return _columns(rows, numbers_from=1) + "\n" + notes


def _columns(rows: Sequence[Row], *, numbers_from: int | None = None) -> str:
    """Columns two spaces apart; those from `numbers_from` on are aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            text.rjust(width) if numbers_from is not None and column >= numbers_from else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
