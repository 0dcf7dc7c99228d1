"""How many threads a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qwenonnx.runtime.cpu import allowed_threads, cpu_info, cpu_quota


def cgroup_v2(folder: Path, text: str) -> Path:
    (folder / "cpu.max").write_text(text + "\n")
    return folder


def cgroup_v1(folder: Path, quota: int, period: int = 100_000) -> Path:
    (folder / "cpu").mkdir()
    (folder / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (folder / "cpu" / "cpu.cfs_period_us").write_text(f"{period}\n")
    return folder


@pytest.mark.parametrize(
    ("text", "threads"),
    [
        ("200000 100000", 2),
        ("150000 100000", 1),
        ("350000 100000", 3),
        ("50000 100000", 1),
        ("1600000 100000", 8),
        ("max 100000", 8),
    ],
)
def test_cgroup_v2_quota_bounds_the_threads(text: str, threads: int, tmp_path: Path) -> None:
    assert allowed_threads({}, cgroup_v2(tmp_path, text), affinity=8) == threads


@pytest.mark.parametrize(("quota", "threads"), [(200_000, 2), (150_000, 1), (-1, 8), (1, 1)])
def test_cgroup_v1_quota_bounds_the_threads(quota: int, threads: int, tmp_path: Path) -> None:
    assert allowed_threads({}, cgroup_v1(tmp_path, quota), affinity=8) == threads


@pytest.mark.parametrize("text", ["", "junk", "1 2 3", "x y"])
def test_an_unreadable_quota_is_no_quota(text: str, tmp_path: Path) -> None:
    assert cpu_quota(cgroup_v2(tmp_path, text)) is None
    assert cpu_quota(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("value", "threads"), [("1", 1), ("3", 3), ("64", 8), ("4,2", 4), ("0", 8), ("-1", 8), ("many", 8), ("", 8)]
)
def test_omp_num_threads_bounds_the_threads(value: str, threads: int, tmp_path: Path) -> None:
    assert allowed_threads({"OMP_NUM_THREADS": value}, tmp_path, affinity=8) == threads


def test_the_least_of_all_limits_counts(tmp_path: Path) -> None:
    cgroup = cgroup_v2(tmp_path, "400000 100000")

    assert allowed_threads({"OMP_NUM_THREADS": "5"}, cgroup, affinity=6) == 4
    assert allowed_threads({"OMP_NUM_THREADS": "3"}, cgroup, affinity=6) == 3
    assert allowed_threads({"OMP_NUM_THREADS": "5"}, cgroup, affinity=2) == 2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks")
def test_the_affinity_mask_bounds_the_threads(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})

        assert allowed_threads({}, tmp_path) == 1
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.parametrize(
    ("flags", "exact"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_vnni", True),
        ("flags : avx2 avx_vnni", True),
        ("Features : fp asimd asimddp", True),
        ("flags : avx2 avx512f", False),
        ("", False),
    ],
)
def test_instruction_sets_are_read_from_cpuinfo(flags: str, exact: bool, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n{flags}\n\nprocessor : 1\nmodel name : B\n")

    info = cpu_info(cpuinfo)

    assert info.model == "Some CPU @ 2 GHz"
    assert info.has_int8_dot is exact
    assert cpu_info(tmp_path / "nowhere").flags == ()


@pytest.mark.parametrize(
    ("membership", "file", "text"),
    [
        ("0::/app.slice/serve.service", "app.slice/serve.service/cpu.max", "200000 100000"),
        ("0::/app.slice/serve.service", "app.slice/cpu.max", "200000 100000"),
        ("4:cpu,cpuacct:/docker/abc\n3:memory:/other", "cpu,cpuacct/docker/abc/cpu.cfs_quota_us", "200000"),
    ],
)
def test_the_quota_of_a_group_deep_in_the_hierarchy_counts(
    membership: str, file: str, text: str, tmp_path: Path
) -> None:
    quota = tmp_path / "groups" / file
    quota.parent.mkdir(parents=True)
    quota.write_text(text + "\n")
    if file.endswith("_us"):
        quota.with_name("cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "membership").write_text(membership + "\n")

    assert cpu_quota(tmp_path / "groups", tmp_path / "membership") == 2


def test_the_tightest_quota_of_the_hierarchy_counts(tmp_path: Path) -> None:
    inner = tmp_path / "groups" / "a" / "b"
    inner.mkdir(parents=True)
    cgroup_v2(inner, "400000 100000")
    cgroup_v2(inner.parent, "300000 100000")
    (tmp_path / "membership").write_text("0::/a/b\n")

    assert cpu_quota(tmp_path / "groups", tmp_path / "membership") == 3
