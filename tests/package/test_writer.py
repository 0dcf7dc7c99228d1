"""Where a package may be written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from packages import contents

from qwenonnx.errors import PackageError
from qwenonnx.package.manifest import clean_name
from qwenonnx.package.package import Package
from qwenonnx.package.writer import ADOPTED, check_target, compact_json


def test_a_new_place_an_empty_folder_and_an_old_package_are_taken(tiny_fp32: Package, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    tuned = shutil.copytree(tiny_fp32.folder, tmp_path / "tuned")
    (tuned / "qwenonnx.tune.json").write_text("{}")

    for target in (tmp_path / "new" / "deep", tmp_path / "empty", tuned):
        check_target(target)


@pytest.mark.parametrize("manifest", ["{", '{"format": 99}', '{"format": 1, "files": 0}'])
def test_a_damaged_package_can_be_made_anew_in_its_place(manifest: str, tiny_fp32: Package, tmp_path: Path) -> None:
    damaged = shutil.copytree(tiny_fp32.folder, tmp_path / "damaged")
    (damaged / "qwenonnx.json").write_text(manifest)

    check_target(damaged)

    (damaged / "thesis.txt").write_text("years of work")
    with pytest.raises(PackageError, match=r"thesis\.txt"):
        check_target(damaged)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")

    with pytest.raises(PackageError, match="file: this is a file"):
        check_target(tmp_path / "file")


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_refused(exists: bool, tmp_path: Path) -> None:
    if exists:
        (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")

    with pytest.raises(PackageError, match="link: this is a symbolic link"):
        check_target(tmp_path / "link")


def test_foreign_files_are_named_and_left(tiny_fp32: Package, tmp_path: Path) -> None:
    target = shutil.copytree(tiny_fp32.folder, tmp_path / "package")
    for name in ("a.txt", "b.txt", "c.txt", "d.txt"):
        (target / name).write_text(name)
    before = contents(target)

    with pytest.raises(PackageError, match=r"not part of a package \(a\.txt, b\.txt, c\.txt, …\)"):
        check_target(target)
    assert contents(target) == before


def test_the_files_of_an_unfinished_package_are_foreign(tiny_fp32: Package, tmp_path: Path) -> None:
    target = shutil.copytree(tiny_fp32.folder, tmp_path / "package")
    (target / "qwenonnx.json").unlink()

    with pytest.raises(PackageError, match="not part of a package"):
        check_target(target)


def test_a_place_inside_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")

    with pytest.raises(PackageError, match=r"file/deep/sub: .*/file is a file, so no folder can be made in it"):
        check_target(tmp_path / "file" / "deep" / "sub")


def test_a_place_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)

    with pytest.raises(PackageError, match=rf"/out: {tmp_path} cannot be written to"):
        check_target(tmp_path / "out")


def test_a_path_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"/\\xff\\xfe: this path is not UTF-8"):
        check_target(tmp_path / "\udcff\udcfe")


@pytest.mark.parametrize(
    ("name", "cleaned"),
    [("Qwen/模型 0.5B", "Qwen/模型 0.5B"), ("a\nb\x7f\u2028", "a_b__"), ("x\udcff", "x_"), ("", "model")],
)
def test_a_models_name_is_made_one_line(name: str, cleaned: str) -> None:
    assert clean_name(name) == cleaned


def test_compacting_keeps_the_content(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    value = {"vocab": {"a b": 1, "é模": 2}, "merges": [["a", " "], ["\n", "x"]]}
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")

    compact_json(path)

    assert json.loads(path.read_text(encoding="utf-8")) == value
    assert path.read_text(encoding="utf-8") == '{"vocab":{"a b":1,"é模":2},"merges":[["a"," "],["\\n","x"]]}\n'


def test_an_adopted_package_is_never_replaced(tiny_fp32: Package, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_fp32.folder, tmp_path / "adopted")
    path = folder / "qwenonnx.json"
    manifest = json.loads(path.read_text())
    manifest["details"][ADOPTED] = True
    path.write_text(json.dumps(manifest))

    with pytest.raises(PackageError, match="an adopted package, whose files are not replaced"):
        check_target(folder)
