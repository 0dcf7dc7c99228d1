"""Files and folders that are either whole or not there."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from pathlib import Path

import pytest
from packages import contents, names

from qwenonnx import files
from qwenonnx.errors import DiskSpaceError
from qwenonnx.files import require_space, sha256_file, staged_folder, write_text

LONG = "x" * 250


@pytest.fixture(params=["exchange", "two renames"])
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of putting a folder in the place of another."""
    if request.param == "two renames":
        monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    return str(request.param)


@pytest.mark.parametrize("name", ["out", LONG, "模" * 80, "-", "a.b", "% s"])
def test_a_staged_folder_takes_its_place_at_the_end(name: str, tmp_path: Path) -> None:
    target = tmp_path / "deep" / name

    with staged_folder(target) as stage:
        (stage / "file").write_text("new")
        (stage / "sub").mkdir()
        assert not target.exists()
        assert stage.parent == target.parent

    assert contents(target) == {"file": b"new"}
    assert names(target.parent) == [name]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o777 & ~umask


@pytest.mark.parametrize("name", ["out", LONG])
@pytest.mark.usefixtures("swap")
def test_a_staged_folder_replaces_the_whole_of_an_old_one(name: str, tmp_path: Path) -> None:
    target = tmp_path / name
    target.mkdir()
    (target / "old").write_text("old")

    with staged_folder(target) as stage:
        (stage / "new").write_text("new")
        assert contents(target) == {"old": b"old"}

    assert contents(target) == {"new": b"new"}
    assert names(tmp_path) == [name]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
@pytest.mark.usefixtures("swap")
def test_a_failure_leaves_the_old_folder(error: type[BaseException], tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_text("old")

    with pytest.raises(error):
        fail_while_writing(target, error())

    assert contents(tmp_path) == {"out/old": b"old"}
    assert names(tmp_path) == ["out"]


def test_a_failure_leaves_no_new_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"):
        fail_while_writing(tmp_path / "out", ValueError("no"))

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["out", LONG])
def test_leftovers_of_dead_runs_are_removed_and_those_of_live_ones_kept(name: str, tmp_path: Path) -> None:
    target = tmp_path / name
    with staged_folder(target) as live:
        prefix = live.name.rpartition("-")[0] + "-"
        dead = tmp_path / f"{prefix}dead"
        dead.mkdir()
        (dead / "file").write_text("half")
        (live / "file").write_text("live")

        with staged_folder(target) as second:
            (second / "file").write_text("second")
            assert not dead.exists()
            assert live.exists()
        assert contents(target) == {"file": b"second"}

    assert contents(target) == {"file": b"live"}
    assert names(tmp_path) == [name]


def test_other_targets_leftovers_and_other_files_are_left(tmp_path: Path) -> None:
    (tmp_path / ".other.partial-abc").mkdir()
    (tmp_path / ".out.partial-file").write_text("a file")
    (tmp_path / "neighbour").mkdir()

    with staged_folder(tmp_path / "out"):
        pass

    assert names(tmp_path) == sorted([".other.partial-abc", ".out.partial-file", "neighbour", "out"])


def test_an_error_names_the_target_and_not_the_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^x/model\.onnx is wrong$"), staged_folder(Path("x")) as stage:
        raise ValueError(f"{stage}/model.onnx is wrong")
    with pytest.raises(FileNotFoundError, match=r"'x/none'$"), staged_folder(Path("x")) as stage:
        (stage / "none").read_text()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> str:
        raise PermissionError(13, "Permission denied", str(tmp_path / ".out.partial-abc"))

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(PermissionError, match=r"/out'$"), staged_folder(tmp_path / "out"):
        pass


def test_an_old_folder_moved_aside_by_a_killed_run_comes_back(tmp_path: Path) -> None:
    aside = tmp_path / ".out.partial-abc-old"
    aside.mkdir()
    (aside / "file").write_text("the only copy")

    with pytest.raises(ValueError, match="no"):
        fail_while_writing(tmp_path / "out", ValueError("no"))

    assert contents(tmp_path) == {"out/file": b"the only copy"}


def test_a_stage_is_locked_while_it_is_written(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "out") as stage:
        handle = os.open(stage, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(handle)


def test_folders_are_exchanged_in_one_step_where_the_system_can(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")

    swapped = files._exchange(tmp_path / "a", tmp_path / "b")

    expected = {"a/b", "b/a"} if swapped else {"a/a", "b/b"}
    assert set(contents(tmp_path)) == expected
    assert not files._exchange(tmp_path / "a", tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["file.json", LONG, "模" * 80])
def test_text_is_replaced_at_once(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write_text(path, "old")
    with path.open(encoding="utf-8") as reader:
        write_text(path, "new é 模型\n")

        assert reader.read() == "old"

    assert path.read_bytes() == "new é 模型\n".encode()
    assert names(tmp_path) == [name]


def test_a_failed_write_leaves_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def fail(handle: int) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk gone"):
        write_text(path, "new")

    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_written_files_are_readable_as_the_umask_says(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_text(tmp_path / "file", "text")
    finally:
        os.umask(old)

    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "text")

        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_sha256_covers_the_whole_file_and_counts_its_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000
    (tmp_path / "file").write_bytes(data)
    counts: list[int] = []

    digest = sha256_file(tmp_path / "file", counts.append)

    assert digest == hashlib.sha256(data).hexdigest() == sha256_file(tmp_path / "file")
    assert sum(counts) == len(data)
    assert len(counts) > 1


def test_space_is_asked_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    require_space(tmp_path / "not" / "yet" / "there", 1)

    with pytest.raises(
        DiskSpaceError, match=r"there: not enough disk space: 1,152,921,504,606,846,976 bytes are needed"
    ):
        require_space(tmp_path / "not" / "yet" / "there", 1 << 60)


def fail_while_writing(target: Path, error: BaseException) -> None:
    with staged_folder(target) as stage:
        (stage / "new").write_text("new")
        raise error
