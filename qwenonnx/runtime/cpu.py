"""How many threads this process may use, and what its CPU can do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
CPUINFO = Path("/proc/cpuinfo")
INTERESTING_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm", "sve")


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """Model name and the instruction sets that decide how fast and how exact integer products are."""

    model: str
    flags: tuple[str, ...]

    @property
    def has_int8_dot(self) -> bool:
        """Whether u8 x s8 products are summed in 32 bits (VNNI on x86, the dot product on ARM)."""
        return any(flag in self.flags for flag in ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp"))


def cpu_info(cpuinfo: Path = CPUINFO) -> CpuInfo:
    """Reads the processor's name and flags; unknown systems give empty ones."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return CpuInfo("unknown", ())
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    return CpuInfo(fields.get("model name", "unknown"), tuple(flag for flag in INTERESTING_FLAGS if flag in flags))


def allowed_threads(
    environment: Mapping[str, str] | None = None, cgroup: Path = CGROUP, affinity: int | None = None
) -> int:
    """Threads that can run at once: the affinity mask, the cgroup's CPU quota and OMP_NUM_THREADS, whichever is least.

    A fractional quota is rounded down (1.5 CPUs give 1 thread): with one thread more the whole pool would be
    throttled for a part of every period. At least 1.
    """
    environment = os.environ if environment is None else environment
    counts = [affinity if affinity is not None else _affinity_count()]
    quota = cpu_quota(cgroup)
    if quota is not None:
        counts.append(int(quota))
    wanted = environment.get("OMP_NUM_THREADS", "").split(",")[0]
    if wanted.isdigit() and int(wanted) > 0:
        counts.append(int(wanted))
    return max(1, min(counts))


def cpu_quota(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> float | None:
    """CPUs that this process's cgroup (v2 or v1) or one above it may use, or None without a limit."""
    quotas = [
        quota
        for folder in group_folders(cgroup, membership)
        for quota in (_quota_v2(folder), _quota_v1(folder))
        if quota is not None
    ]
    return min(quotas, default=None)


def group_folders(cgroup: Path, membership: Path, controller: str = "cpu") -> set[Path]:
    """Folders of the groups that this process is in, and of those above them, in every hierarchy of a controller."""
    folders = {cgroup, cgroup / controller}
    try:
        lines = membership.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for root in (cgroup / controllers, cgroup / controller) if controllers else (cgroup,):
            folder = root / path.lstrip("/")
            folders.update((folder, *folder.parents[: len(folder.parts) - len(root.parts)]))
    return folders


def _affinity_count() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        period = int((folder / "cpu.cfs_period_us").read_text(encoding="ascii"))
        return None if quota <= 0 else quota / period
    except (OSError, ValueError):
        return None
