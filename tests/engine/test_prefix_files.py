"""Rows as files: what is written is read again, and what is damaged never."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qwenonnx.engine.prefix_files import DamagedError, PrefixFiles, package_sum
from qwenonnx.package.package import Package

IDS = list(range(50, 90))


def arrays(seed: int = 0, length: int = len(IDS)) -> list[NDArray[Any]]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal((2, length, 4), dtype=np.float32) for _ in range(6)]


@pytest.fixture
def files(tmp_path: Path) -> PrefixFiles:
    return PrefixFiles(tmp_path / "prefixes", "a" * 64, limit=1_000_000)


def write(files: PrefixFiles, ids: list[int], seed: int = 0) -> Path:
    assert files.write(ids, arrays(seed, len(ids)), lambda: False)
    return files.path(ids)


def test_what_is_written_is_read_again_bit_by_bit(files: PrefixFiles) -> None:
    path = write(files, IDS, seed=3)
    assert files.newest_first() == [path]
    assert files.read_tokens(path) == IDS
    target = [np.zeros_like(array) for array in arrays()]
    files.read_into(path, target)
    for mine, theirs in zip(target, arrays(3), strict=True):
        assert (mine == theirs).all()


def test_only_the_user_may_read_prompts(files: PrefixFiles) -> None:
    path = write(files, IDS)
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize("at", [0, 20, 200, 250, 2000, -40, -1])
def test_a_changed_byte_is_noticed(files: PrefixFiles, at: int) -> None:
    path = write(files, IDS)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError):
        files.read_into(path, arrays())


@pytest.mark.parametrize("size", [0, 1, 40, 150, 300, 3000, -32, -1])
def test_a_file_that_is_cut_off_is_noticed(files: PrefixFiles, size: int) -> None:
    path = write(files, IDS)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DamagedError):
        files.read_into(path, arrays())


@pytest.mark.parametrize(
    "text", [b"\n", b"[]\n", b"{}\n", b'"x"\n', b'{"format": 1, "package": "a"}\n', b"\xff" * 9000]
)
def test_other_contents_are_no_prefix(files: PrefixFiles, text: bytes) -> None:
    path = write(files, IDS)
    path.write_bytes(text)
    with pytest.raises(DamagedError):
        files.read_tokens(path)


def test_a_number_of_tokens_that_cannot_be_is_no_reason_to_take_memory(files: PrefixFiles) -> None:
    path = write(files, IDS)
    path.write_bytes(path.read_bytes().replace(b'"tokens": 40', b'"tokens": 2000000000'))
    with pytest.raises(DamagedError, match="cut off"):
        files.read_tokens(path)


def test_more_behind_the_end_is_noticed(files: PrefixFiles) -> None:
    path = write(files, IDS)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(DamagedError, match="sum"):
        files.read_into(path, arrays())


def test_arrays_of_other_sizes_are_refused(files: PrefixFiles) -> None:
    path = write(files, IDS)
    for other in (arrays()[:5], arrays(length=39), [array.astype(np.float16) for array in arrays()]):
        with pytest.raises(DamagedError, match="another model"):
            files.read_into(path, other)


def test_another_packages_files_are_not_seen(files: PrefixFiles) -> None:
    path = write(files, IDS)
    other = PrefixFiles(files.folder, "b" * 64, files.limit)
    assert other.newest_first() == []
    with pytest.raises(DamagedError, match="another package"):
        other.read_tokens(path)


def test_stopping_leaves_no_file(files: PrefixFiles) -> None:
    answers = iter([False, False, True])
    assert not files.write(IDS, arrays(), lambda: next(answers))
    assert list(files.folder.iterdir()) == []


def test_the_limit_keeps_those_used_last(files: PrefixFiles) -> None:
    paths = [write(files, [i, *IDS]) for i in range(4)]
    for age, i in enumerate((2, 0, 3, 1)):
        files.touch([i, *IDS], age * 100.0)
    size = paths[0].stat().st_size
    PrefixFiles(files.folder, "b" * 64, limit=2 * size).prune()
    assert files.newest_first() == [paths[2], paths[0]]


def test_what_a_killed_process_left_goes_after_a_while(files: PrefixFiles) -> None:
    write(files, IDS)
    fresh, stale = files.folder / "x.partial", files.folder / "y.partial"
    for path in (fresh, stale):
        path.touch()
    os.utime(stale, (0, 0))
    files.prune()
    assert (fresh.exists(), stale.exists()) == (True, False)


def test_the_sum_is_that_of_graph_and_weights(tiny_fp32: Package, tiny_int8: Package) -> None:
    assert package_sum(tiny_fp32) == package_sum(Package.open(tiny_fp32.folder))
    assert package_sum(tiny_fp32) != package_sum(tiny_int8)
