"""The demo model's text: works, the split by work, and chat turns made from the plays."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

# One play in both editions, one more, one epic, and two books of the King James Version (about 5% of the bytes).
HELD_OUT_WORKS = ("tempest", "twelfth_night", "paradise_regained", "the_acts", "ecclesiastes")

MAX_SPEECH_CHARS = 1500
MAX_TURNS = 8
OPENING_CHARS = 100

# Speakers shortened in plays whose file has no list of persons, or spells them otherwise there.
ABBREVIATIONS = {
    "DOUG": "DOUGLAS",
    "FAL": "FALSTAFF",
    "GLEND": "GLENDOWER",
    "GLOU": "GLOUCESTER",
    "HOT": "HOTSPUR",
    "MACB": "MACBETH",
    "WOR": "WORCESTER",
}

# A speaker's line stands alone after an empty line, and the speech follows at once: "Ham.", "KING HENRY." or "EGEUS".
SPEAKER = re.compile(r"(?:^|\n\n)([A-Z1-4][A-Za-z' .&-]{1,28}?)[.:]?[ ]*\n(?=\S| )")
STAGE_DIRECTION = re.compile(r"\[[^\]]*\]")


@dataclass(frozen=True, kw_only=True)
class Work:
    """One file of text. `title` is the file's name up to the first dot: all editions of a work share it."""

    title: str
    name: str
    text: str

    @property
    def num_bytes(self) -> int:
        """Length in UTF-8 bytes."""
        return len(self.text.encode())


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One chat turn: a speaker's name in capitals, and what they say."""

    speaker: str
    speech: str


def read_works(paths: tuple[Path, ...]) -> list[Work]:
    """Read files, and all `*.txt` of folders, as UTF-8 works in the order of their names."""
    files = sorted({file for path in paths for file in (path.glob("*.txt") if path.is_dir() else (path,))})
    if not files:
        raise ValueError(f"--text names no file and no folder with *.txt files: {', '.join(map(str, paths))}")
    return [Work(title=f.name.split(".")[0], name=f.stem, text=f.read_text(encoding="utf-8")) for f in files]


def split_by_work(works: list[Work], held_out: tuple[str, ...]) -> tuple[list[Work], list[Work]]:
    """Return (training works, held-out works); every edition of a held-out title is held out.

    Raises ValueError if a held-out title is not among the works, or nothing is left to train on.
    """
    missing = sorted(set(held_out) - {work.title for work in works})
    if missing or not held_out:
        raise ValueError(f"--held-out {missing or '(none)'} not among the texts; choose from file names up to the dot")
    train = [work for work in works if work.title not in held_out]
    if not train:
        raise ValueError("--held-out names every work: nothing is left to train on")
    return train, [work for work in works if work.title in held_out]


def full_name(speaker: str, persons: str) -> str:
    """Complete an abbreviated speaker ("Ham") from the list of persons that heads a play; capitals throughout."""
    name = speaker.strip().rstrip(".").upper()
    if name in ABBREVIATIONS:
        return ABBREVIATIONS[name]
    if " " not in name and len(name) <= 5:
        match = re.search(rf"\b{re.escape(name)}[a-z]*\b", persons, flags=re.IGNORECASE)
        if match is not None:
            return match.group().upper()
    return name


def play_turns(work: Work) -> list[Turn]:
    """The speeches of a play in order, without stage directions; empty for a text that is no play."""
    pieces = SPEAKER.split(work.text)
    persons, turns = pieces[0][:6000], []
    for speaker, body in zip(pieces[1::2], pieces[2::2], strict=True):
        body = re.split(r"\n\n(?:ACT|SCENE|Act|Scene)\b", body)[0]
        lines = [line.strip() for line in STAGE_DIRECTION.sub("", body).split("\n")]
        speech = "\n".join(line for line in lines if line)
        if speech and len(speech) <= MAX_SPEECH_CHARS:
            turns.append(Turn(speaker=full_name(speaker, persons), speech=speech))
    return turns if len(turns) >= 100 else []


def conversations(works: list[Work], seed: int) -> list[list[Turn]]:
    """Make conversations from the plays in modern spelling, in random order.

    Each speech of OPENING_CHARS or more is a conversation of one turn; and runs of 2 to MAX_TURNS consecutive
    speeches are cut from the plays, each starting with such a speech, so that a first answer is seldom one word.
    """
    rng = random.Random(seed)
    result = []
    for work in works:
        turns = play_turns(work) if ".folio" not in work.name else []
        start = 0
        while start < len(turns):
            if len(turns[start].speech) < OPENING_CHARS:
                start += 1
                continue
            length = rng.randint(2, MAX_TURNS)
            result.append(turns[start : start + length])
            start += length
        result += [[turn] for turn in turns if len(turn.speech) >= OPENING_CHARS]
    rng.shuffle(result)
    return result
