"""How much memory this process has and had."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
SMAPS = Path("/proc/self/smaps")


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


def release_file_pages(path: Path) -> int:
    """Takes the pages of a mapped file out of this process's memory; returns the bytes of the mappings treated.

    They come back from the system's cache, or the file, when they are used. Mappings with private changes are left
    alone, and systems without /proc too.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return 0
    try:
        text = SMAPS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    name = re.escape(str(path.resolve()))
    entry = rf"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ +{name}$(.*?)^Private_Dirty: +(\d+) kB"
    released = 0
    for start, end, _, dirty in re.findall(entry, text, re.MULTILINE | re.DOTALL):
        address, size = int(start, 16), int(end, 16) - int(start, 16)
        if dirty == "0" and libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_DONTNEED) == 0:
            released += size
    return released
