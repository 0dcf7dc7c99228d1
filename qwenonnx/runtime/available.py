"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

from qwenonnx.runtime.cpu import CGROUP, MEMBERSHIP, group_folders

MEMINFO = Path("/proc/meminfo")
# Limit and present use, in version 2 and version 1 of cgroups.
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def available_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes that the system and the limits of the cgroups leave, whichever are fewest; None where nothing tells."""
    found = [_of_system(meminfo)]
    for folder in group_folders(cgroup, membership, "memory"):
        found += [_of_group(folder, *names) for names in _LIMITS]
    return min((value for value in found if value is not None), default=None)


def _of_system(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _of_group(folder: Path, limit: str, usage: str) -> int | None:
    try:
        return max(0, int((folder / limit).read_text(encoding="ascii")) - _used(folder, usage))
    except (OSError, ValueError):  # "max" is no limit
        return None


def _used(folder: Path, usage: str) -> int:
    """What the group uses, without the pages of files that it can let go at any time."""
    used = int((folder / usage).read_text(encoding="ascii"))
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return used
    return max(0, used - int(stat.get("inactive_file", 0)) - int(stat.get("active_file", 0)))
