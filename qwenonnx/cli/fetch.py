"""Pulling as `pull` and `export` show it: lines, a bar on a terminal, and what Ctrl-C means."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from qwenonnx.cli.console import say, silence
from qwenonnx.files import Progress

EXIT_INTERRUPTED = 130


def fetch(name_or_id: str | None, models_dir: Path, *, quiet: bool) -> Path:
    """The folder of a checkpoint, pulled if it is not there; None means the default model.

    Raises:
        UsageError: the name is unknown.
        PullError: the download failed.
        DiskSpaceError: there is no room for the checkpoint.
    """
    from qwenonnx.pull.pull import pull, pull_default

    tell = silence if quiet else say
    try:
        with _hub_bars(hidden=quiet), _download_bar(shown=not quiet and sys.stderr.isatty()) as progress:
            if name_or_id is None:
                return pull_default(models_dir, tell, progress)[1]
            return pull(name_or_id, models_dir, tell, progress)
    except KeyboardInterrupt:
        say("interrupted; run it again to go on")
        raise typer.Exit(EXIT_INTERRUPTED) from None


@contextlib.contextmanager
def _download_bar(*, shown: bool) -> Iterator[Progress | None]:
    """A bar with bytes and rate; it appears with the first call, because the hub's library draws its own."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    bars = Bars(*columns, console=Console(stderr=True))

    def advance(done: int, total: int) -> None:
        if not bars.task_ids:
            bars.add_task("downloading", completed=done, total=total)
            bars.start()
        bars.update(bars.task_ids[0], completed=done, total=total)

    try:
        yield advance
    finally:
        bars.stop()


@contextlib.contextmanager
def _hub_bars(*, hidden: bool) -> Iterator[None]:
    """Switches the bars of huggingface_hub off inside the block, if so wanted."""
    if not hidden:
        yield
        return
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
