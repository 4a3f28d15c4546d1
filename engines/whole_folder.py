"""Writes a folder so that it appears under its name only when it is complete and on disk."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_LOCK = "lock"

_REMEDIES = {
    errno.ENOSPC: "free some space, or choose another place with --out",
    errno.EDQUOT: "your quota is used up: free some space, or choose another place with --out",
    errno.EACCES: "choose a place that you may write to with --out",
    errno.EPERM: "choose a place that you may write to with --out",
    errno.EROFS: "choose a place that you may write to with --out",
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns file system errors into a ValueError that names the path and a remedy."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "choose another place with --out")
        raise ValueError(f"{path}: cannot be written: {error.strerror or error}; {remedy}") from error


@contextmanager
def whole_folder(out: Path, *, markers: Sequence[str], overwrite: bool) -> Iterator[Path]:
    """A new folder beside `out` to fill. It is renamed to `out` when the body ends, and removed if the body raises.

    A folder at `out` is replaced if overwrite is true and it holds files called `markers`. The new folder is locked as
    long as this process lives. So folders that killed processes have left are known by having no lock, and are removed.
    Raises ValueError, naming the path and a remedy, if `out` is in use or cannot be written.
    """
    check_target(out, markers, overwrite)
    prefix = f".{out.name}.building-"
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        for path in list(out.parent.iterdir()):
            if path.name.startswith(prefix) and not _locked(path):
                shutil.rmtree(path)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
        folder.chmod(0o777 & ~_umask())  # mkdtemp makes folders that only their owner can read
        lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder
        with writing(out):
            for path in (*folder.rglob("*"), folder):
                _sync(path)
            (folder / _LOCK).unlink()
            _rename(folder, out, prefix, markers, overwrite)
            _sync(out.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def check_target(out: Path, markers: Sequence[str], overwrite: bool) -> None:
    """ValueError, with a remedy, if whole_folder would refuse to put a folder at `out`."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out}: is a file; choose another place with --out")
    if not any(out.iterdir()):
        return
    if not all((out / name).is_file() for name in markers):
        raise ValueError(f"{out}: is there and holds other things than an engine; choose another place with --out")
    if not overwrite:
        raise ValueError(f"{out}: is an engine already; replace it with --overwrite or choose another place with --out")


def _locked(folder: Path) -> bool:
    """Whether a living process is filling the folder."""
    try:
        with (folder / _LOCK).open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _rename(folder: Path, out: Path, prefix: str, markers: Sequence[str], overwrite: bool) -> None:
    check_target(out, markers, overwrite)  # another build may have come first
    if not (overwrite and out.exists()):
        folder.rename(out)
        return
    # With two renames there is nothing at `out` for a moment. No portable call exchanges two folders.
    old = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
    out.rename(old)
    try:
        folder.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    """The process's umask; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
