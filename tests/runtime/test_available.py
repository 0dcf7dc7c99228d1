"""What memory a process may still take."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwenonnx.runtime.available import available_memory


@pytest.fixture
def system(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal: 4000 kB\nMemAvailable:    3000 kB\n")
    (tmp_path / "membership").write_text("0::/box\n")
    (tmp_path / "cgroup" / "box").mkdir(parents=True)
    return tmp_path


def available(system: Path) -> int | None:
    return available_memory(system / "meminfo", system / "cgroup", system / "membership")


def test_without_limits_the_system_tells(system: Path) -> None:
    assert available(system) == 3000 * 1024


def test_the_group_limits_what_the_system_has(system: Path) -> None:
    box = system / "cgroup" / "box"
    (box / "memory.max").write_text("1000000\n")
    (box / "memory.current").write_text("700000\n")
    assert available(system) == 300_000
    (box / "memory.stat").write_text("anon 1\ninactive_file 100000\nactive_file 50000\n")
    assert available(system) == 450_000


def test_no_limit_and_a_limit_of_the_group_above(system: Path) -> None:
    (system / "cgroup" / "box" / "memory.max").write_text("max\n")
    (system / "cgroup" / "box" / "memory.current").write_text("700000\n")
    (system / "cgroup" / "memory.max").write_text("800000\n")
    (system / "cgroup" / "memory.current").write_text("900000\n")
    assert available(system) == 0


def test_version_1_of_cgroups(system: Path) -> None:
    folder = system / "cgroup" / "memory" / "box"
    folder.mkdir(parents=True)
    (system / "membership").write_text("3:memory:/box\n")
    (folder / "memory.limit_in_bytes").write_text("500000\n")
    (folder / "memory.usage_in_bytes").write_text("100000\n")
    assert available(system) == 400_000


def test_where_nothing_tells(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "a", tmp_path / "b", tmp_path / "c") is None
