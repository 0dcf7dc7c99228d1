"""Killed at any moment, a run leaves the old package, and nothing that looks like a new one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from packages import contents, export_folder, quantize
from tiny import write_tiny_checkpoint

from qwenonnx.errors import PackageError
from qwenonnx.package.package import Package

SCRIPT = Path(__file__).parent / "interrupted_run.py"


class Interrupter:
    """Drives the helper process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, moment: int) -> list[str]:
        """Runs until `moment`; -1 is never. Returns the words of the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{moment}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().split()


@contextmanager
def interrupter(kind: str, source: Path, target: Path) -> Iterator[Interrupter]:
    command = [sys.executable, str(SCRIPT), kind, str(source), str(target)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield Interrupter(process)
        finally:
            process.kill()


def opens(folder: Path) -> bool:
    try:
        Package.open(folder).check_sums()
    except PackageError:
        return False
    return True


@pytest.mark.parametrize("kind", ["export", "quantize"])
def test_a_killed_run_leaves_the_old_package(kind: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    other = write_tiny_checkpoint(tmp_path / "other", seed=1)
    target = tmp_path / "packages" / "target"
    old_source = export_folder(tiny_checkpoint, tmp_path / "old")
    if kind == "export":
        export_folder(tiny_checkpoint, target)
        source = other
    else:
        quantize(old_source, target)
        source = export_folder(other, tmp_path / "new").folder
    old = contents(target)

    with interrupter(kind, source, tmp_path / "scratch" / "target") as first:
        answer, moments = first.run(-1)
    assert answer == "done"
    last = int(moments)
    assert last > 50
    new = contents(tmp_path / "scratch" / "target")
    assert new != old

    # The last moments are those of the swap and of removing what was there before.
    with interrupter(kind, source, target) as repeated:
        for moment in sorted({*range(1, last, max(1, last // 8)), *range(last - 16, last + 1)}):
            assert repeated.run(moment)[0] == "killed"
            assert contents(target) in (old, new), f"moment {moment} of {last}"
            if contents(target) == old:
                # A stage whose manifest is written is whole, and waits only for its rename.
                leftovers = [path for path in target.parent.iterdir() if path != target]
                assert all(contents(path) == new for path in leftovers if opens(path)), f"moment {moment} of {last}"
        assert repeated.run(-1)[0] == "done"

    assert contents(target) == new
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("kind", ["export", "quantize"])
def test_a_killed_first_run_leaves_nothing_that_opens(kind: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = tiny_checkpoint if kind == "export" else export_folder(tiny_checkpoint, tmp_path / "fp32").folder
    target = tmp_path / "packages" / "target"

    with interrupter(kind, source, target) as repeated:
        for moment in (1, 10, 20, 30, 40):
            assert repeated.run(moment)[0] == "killed"
            assert not target.exists()
            found = list(target.parent.iterdir()) if target.parent.exists() else []
            assert not any(opens(path) for path in found)
        assert repeated.run(-1)[0] == "done"

    assert opens(target)
    assert list(target.parent.iterdir()) == [target]
