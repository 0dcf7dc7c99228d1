"""What commands say while they work: stages with progress on stderr, results on stdout."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from qwenonnx.errors import UsageError
from qwenonnx.files import Progress, write_text

if TYPE_CHECKING:
    from rich.progress import Progress as Bars


class Stages:
    """Shows one stage of work after the other: a bar on a terminal, elsewhere a line per finished stage.

    Elsewhere a stage that takes longer than `patience` seconds has a line before it is finished, too.
    """

    def __init__(self, *, quiet: bool = False, patience: float = 2.0) -> None:
        self._quiet = quiet
        self._patience = patience
        self._waiting: threading.Timer | None = None
        self._bars: Bars | None = None
        self._label = ""
        self._started = 0.0

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bars

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TextColumn("elapsed"),
            )
            self._bars = Bars(*columns, console=Console(stderr=True))
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_waiting()
        if self._bars is not None:
            if error is None:
                for task in self._bars.tasks:
                    self._bars.update(task.id, total=task.total or 1, completed=task.total or 1)
            self._bars.stop()
        elif error is None:
            self._finish_line()

    def begin(self, label: str) -> Progress:
        """Starts a stage; the callback it returns takes (done, total)."""
        bars = self._bars
        if bars is None:
            self._finish_line()
            self._label, self._started = label, time.monotonic()
            if not self._quiet:
                self._waiting = threading.Timer(self._patience, say, (f"{label} …",))
                self._waiting.daemon = True
                self._waiting.start()
            return lambda done, total: None
        for previous in bars.tasks:
            bars.update(previous.id, total=previous.total or 1, completed=previous.total or 1)
        task = bars.add_task(label, total=None)
        return lambda done, total: bars.update(task, completed=done, total=total)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting.join()  # so that its line, if it is just being written, comes first
            self._waiting = None

    def _finish_line(self) -> None:
        self._stop_waiting()
        if self._label and not self._quiet:
            say(f"{self._label}: done in {time.monotonic() - self._started:.1f} s")
        self._label = ""


def describe_gate(gate: Mapping[str, Any] | None) -> str:
    """One line about the comparison of a quantized package with its input, from the manifest (None: it has none)."""
    if not gate or "passed" not in gate:
        return "not measured"
    verdict = "passed the gate" if gate["passed"] else f"FAILED the gate: {gate.get('failure')}"
    if "kl_mean" not in gate:
        return verdict
    return (
        f"{verdict} (mean KL {gate['kl_mean']:.4f} from its input, same likeliest token at "
        f"{gate['top1_agreement']:.1%} of {gate['positions']:,} positions, perplexity {gate['perplexity']:.2f} against "
        f"{gate['reference_perplexity']:.2f})"
    )


def say(text: str) -> None:
    """Tells people something that is not the result."""
    print(text, file=sys.stderr, flush=True)


def silence(text: str) -> None:
    """Takes the place of `say` where nothing is to be said."""


def table(headers: list[str], rows: list[list[str]]) -> str:
    """Rows of text in aligned columns, the first to the left and the others to the right."""
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]
    lines = []
    for row in [headers, *rows]:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def check_results_path(path: Path | None) -> Path | None:
    """Checks before the work that its results can be written to `path`.

    Raises:
        UsageError: it is a folder, or its folder does not exist.
    """
    if path is not None and path.is_dir():
        raise UsageError(f"{path}: this is a folder; name a file in it.")
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"{path.parent}: there is no such folder; make it first, or write to another place.")
    return path


def write_results(path: Path | None, results: Mapping[str, Any]) -> None:
    """Writes results as JSON to a file, or to stdout for '-'."""
    if path is None:
        return
    text = json.dumps(results, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    write_text(path, text)
