"""The system's accounting of this process, and giving back the pages of files."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from qwenonnx.runtime import memory
from qwenonnx.runtime.memory import process_memory, release_file_pages, reset_peak

MIB = 1 << 20
SIZE = 32 * MIB
needs_accounting = pytest.mark.skipif(not memory.STATUS.exists(), reason="this system has no /proc/self/status")


@needs_accounting
def test_written_memory_is_counted_and_the_peak_stays() -> None:
    reset_peak()
    before = process_memory()

    block = np.ones(SIZE, dtype=np.uint8)
    during = process_memory()
    del block
    after = process_memory()

    assert during.anonymous - before.anonymous > SIZE * 0.9
    assert during.resident - before.resident > SIZE * 0.9
    assert after.resident < during.resident - SIZE // 2
    assert after.peak > during.resident - MIB  # the system counts in batches


def test_without_accounting_the_peak_stands_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "STATUS", tmp_path / "nowhere")

    figures = process_memory()

    assert figures.resident == figures.peak == figures.anonymous > 10 * MIB


@needs_accounting
@pytest.mark.parametrize("name", ["weights", "odd (name) + 模型.data"])
def test_pages_of_a_mapped_file_are_given_back_and_read_again(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.write(bytes(range(256)) * (SIZE // 256))
        file.flush()
        os.fsync(file.fileno())  # pages that are not yet on disk count as changed
    (tmp_path / "other").write_bytes(b"x" * MIB)
    with path.open("rb") as reader, mmap.mmap(reader.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert len(mapped.read()) == SIZE
        before = process_memory().resident

        released = release_file_pages(path)
        after = process_memory().resident

        assert released == SIZE
        assert before - after > SIZE * 0.9
        assert mapped[SIZE - 300 :] == path.read_bytes()[SIZE - 300 :]
        assert release_file_pages(tmp_path / "other") == 0


@needs_accounting
def test_a_mapping_with_changes_of_its_own_is_left(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        mapped[5] = 7

        assert release_file_pages(path) == 0
        assert mapped[5] == 7
