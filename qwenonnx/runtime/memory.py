"""How much memory this process has and had."""

from __future__ import annotations

import contextlib
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes: resident now, resident at most, and of the present ones those not backed by a file."""

    resident: int
    peak: int
    anonymous: int


def process_memory() -> ProcessMemory:
    """Reads the system's own accounting; where it has no /proc, only the peak is known and stands for all."""
    try:
        lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return ProcessMemory(peak, peak, peak)
    fields = {name: value for name, _, value in (line.partition(":") for line in lines)}

    def kib(name: str) -> int:
        return int(fields.get(name, "0 kB").split()[0]) * 1024

    return ProcessMemory(kib("VmRSS"), kib("VmHWM"), kib("RssAnon"))


def reset_peak() -> None:
    """Lets `peak` start anew from the present value, where the system allows it."""
    with contextlib.suppress(OSError):
        CLEAR_REFS.write_text("5", encoding="ascii")
