"""README.md and docs/*.md in parts: fenced blocks with what their info strings say of them, links, and headings.

A block of bash says after its language what a test does with it:

    test                run, in order, against a server with the demo model; `json output` or `text output` may follow
    nightly             the same among the slow proofs
    serve               a command that serves: its options are checked, and it is run among the slow proofs
    nightly-serve       the same, where more than `splash-trt` starts it
    no-test: REASON     not run

A block of JSON may be the `output` of the one before it, the `output-part` of one of its fields, or `explain`: what
the policy has seen of a load.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
KINDS = ("test", "nightly", "serve", "nightly-serve")
NO_TEST = "no-test:"

_FENCE = re.compile(r"^ *```(.*)$")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block; line: of its opening fence, from 1."""

    page: Path
    line: int
    language: str
    kind: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    opened: tuple[int, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if fence is None:
            lines.append(line)
        elif opened is None:
            opened, lines = (number, fence[1].strip()), []
        else:
            assert not fence[1].strip(), f"{page.name}:{number}: a block begins inside of one"
            language, _, kind = opened[1].partition(" ")
            found.append(Block(page, opened[0], language, kind.strip(), "\n".join(lines)))
            opened = None
    assert opened is None, f"{page.name}: the block at line {opened and opened[0]} does not end"
    return found


def prose(page: Path) -> str:
    """The page without its blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    return _LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in _HEADING.findall(prose(page))}
