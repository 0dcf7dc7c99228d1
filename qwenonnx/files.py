"""Writing files so that a half-written result is never taken for a whole one."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from qwenonnx.errors import DiskSpaceError

Progress = Callable[[int, int], None]
"""Called with (done, total) as work goes on; the unit is the caller's."""

_CHUNK = 1 << 20
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_OLD = "-old"


def sha256_file(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """Hex SHA-256 of a file; `advance` is called with the number of bytes read since its last call."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            if advance is not None:
                advance(len(chunk))
    return digest.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Replaces a file's content at once: readers see the old or the new text, never a part.

    What is no regular file (a device, a pipe) is written to, not replaced.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:50]}.", suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def is_utf8(path: Path) -> bool:
    """Whether a path is text; on Linux a file's name may be any bytes."""
    return printable(path) == str(path)


def printable(path: Path) -> str:
    """A path as text that can be shown: bytes that are no UTF-8 are escaped, in hexadecimal."""
    return os.fsencode(path).decode(errors="backslashreplace")


def require_space(folder: Path, needed: int) -> None:
    """Checks that `needed` bytes fit on the file system of `folder` (which need not exist yet).

    Raises:
        DiskSpaceError: they do not; the message names the folder, the bytes needed and the bytes free.
    """
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise DiskSpaceError(
            f"{folder}: not enough disk space: {needed:,} bytes are needed and {free:,} are free; "
            "free some space or choose another folder with -o."
        )


@contextlib.contextmanager
def disk_full_named(folder: Path) -> Iterator[None]:
    """Turns a full disk met inside the block into a DiskSpaceError that names `folder`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder.absolute().parent).free
        raise DiskSpaceError(
            f"{folder}: the disk filled up while writing ({free:,} bytes were free at the end); "
            "free some space and run the command again."
        ) from error


@contextlib.contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside `target`, which takes the place of `target` when the block succeeds.

    If the block fails, or the process is killed, `target` is what it was before. An existing `target` is swapped
    in one step where the file system can (renameat2), and removed after. Left-overs of killed runs are removed.
    Errors that name the folder that is written in name `target` instead.
    """
    named, target = target, target.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale_stages(target)
        stage = Path(tempfile.mkdtemp(dir=target.parent, prefix=_stage_prefix(target)))
    except OSError as error:
        error.filename = str(named)
        raise
    lock = os.open(stage, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        umask = os.umask(0)
        os.umask(umask)
        stage.chmod(0o777 & ~umask)
        with disk_full_named(target):
            yield stage
            for path in stage.rglob("*"):
                _fsync(path)
            _fsync(stage)
        _replace_folder(stage, target)
        _fsync(target.parent)
    except Exception as error:
        _rename_in_text(error, stage, named)
        raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        os.close(lock)


def _rename_in_text(error: Exception, stage: Path, named: Path) -> None:
    """Puts `named` where an error says `stage`, a folder that will be gone when somebody reads it."""
    error.args = tuple(arg.replace(str(stage), str(named)) if isinstance(arg, str) else arg for arg in error.args)
    if isinstance(error, OSError):
        for place in ("filename", "filename2"):
            if isinstance(path := getattr(error, place), str | Path):
                setattr(error, place, str(path).replace(str(stage), str(named)))


def _stage_prefix(target: Path) -> str:
    # File names are limited to 255 bytes; a long target keeps a recognisable prefix and gets a hash of the rest.
    name = os.fsencode(target.name)
    if len(name) <= 100:
        return f".{target.name}.partial-"
    return f".{hashlib.sha256(name).hexdigest()[:16]}.partial-"


def _remove_stale_stages(target: Path) -> None:
    prefix = _stage_prefix(target)
    for path in target.parent.iterdir():
        if not path.name.startswith(prefix) or not path.is_dir():
            continue
        if path.name.endswith(_OLD) and not target.exists():
            path.rename(target)  # killed between the two renames of _replace_folder
            continue
        handle = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass  # a run that is still alive
        finally:
            os.close(handle)


def _replace_folder(stage: Path, target: Path) -> None:
    if not target.exists():
        stage.rename(target)
        return
    if not _exchange(stage, target):
        # Not atomic, but the old folder can be found beside the target if the process dies in between.
        old = stage.with_name(stage.name + _OLD)
        target.rename(old)
        stage.rename(target)
        shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two folders in one step; False where the system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    renameat2 = getattr(libc, "renameat2", None)
    if renameat2 is None:
        return False
    code: int = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return code == 0


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
