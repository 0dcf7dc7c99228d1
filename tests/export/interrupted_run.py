"""Runs an export or a quantization again and again, each time killed at another moment; a helper process.

    python interrupted_run.py export|quantize SOURCE TARGET

Reads numbers from stdin, one a line. For each it forks a process that starts the work and gets SIGKILL from itself
at that moment, moments being system events (a file opened, renamed, removed) and tensors read. Answers `killed`, or
`done` and how many moments there were.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from qwenonnx.checkpoint.open import open_checkpoint
from qwenonnx.export.exporter import export_checkpoint
from qwenonnx.files import Progress
from qwenonnx.package.package import Package
from qwenonnx.quantize.quantizer import quantize_package

EVENTS = ("open", "os.rename", "os.mkdir", "os.chmod", "os.remove", "os.rmdir", "os.listdir", "shutil.rmtree")


class Clock:
    """Counts moments, and ends the process at one of them."""

    def __init__(self, end: int) -> None:
        self.now = 0
        self._end = end

    def tick(self) -> None:
        self.now += 1
        if self.now == self._end:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS:
            self.tick()

    def stage(self, label: str) -> Progress:
        self.tick()
        return lambda done, total: self.tick()


def work(kind: str, source: Path, target: Path, clock: Clock) -> None:
    if kind == "export":
        export_checkpoint(open_checkpoint(source), target, model="tiny", stage=clock.stage)
    else:
        quantize_package(Package.open(source), target, "int8", stage=clock.stage)


def main(kind: str, source: Path, target: Path) -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            clock = Clock(int(line))
            sys.addaudithook(clock.hook)
            work(kind, source, target, clock)
            print("done", clock.now, flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            print("killed", flush=True)
        elif status:
            raise SystemExit(f"the {kind} failed")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
