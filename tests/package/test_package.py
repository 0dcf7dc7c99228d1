"""Opening a package: what is missing, cut off, changed or not understood is said, with the file's name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packages import TOKENS, contents, package_runner

from qwenonnx.errors import PackageError, UsageError
from qwenonnx.package.manifest import FileEntry, Manifest
from qwenonnx.package.package import SMALL_FILE, Package
from qwenonnx.runtime.load import load_runner
from qwenonnx.runtime.session import SessionConfig


@pytest.fixture
def folder(tiny_fp32: Package, tmp_path: Path) -> Path:
    """A copy of the fp32 package that a test may damage."""
    return shutil.copytree(tiny_fp32.folder, tmp_path / "package")


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "qwenonnx.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    change(manifest)
    path.write_text(json.dumps(manifest), encoding="utf-8")


def test_a_whole_package_opens(folder: Path) -> None:
    package = Package.open(folder)
    package.check_sums()

    assert package.manifest.recipe == "fp32"
    assert package.config.hidden_size == 64
    assert package.generation_config["top_k"] == 20
    assert package.bytes == sum(path.stat().st_size for path in folder.iterdir() if path.name != "qwenonnx.json")


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.onnx",
        "model.onnx.data",
        "tokenizer.json",
        "tokenizer_config.json",
    ],
)
def test_a_missing_file_is_named(name: str, folder: Path) -> None:
    (folder / name).unlink()

    with pytest.raises(PackageError, match=f"{name}: this file of the package is missing"):
        Package.open(folder)


def test_a_data_file_cut_short_is_named_with_both_sizes(folder: Path) -> None:
    data = folder / "model.onnx.data"
    size = data.stat().st_size
    data.write_bytes(data.read_bytes()[:-1])

    with pytest.raises(PackageError, match=rf"model\.onnx\.data: {size - 1:,} bytes, but the manifest says {size:,}"):
        Package.open(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.onnx"])
def test_a_changed_small_file_is_found_on_opening(name: str, folder: Path) -> None:
    flip_byte(folder / name)

    with pytest.raises(PackageError, match=f"{name}: the content does not match its sum"):
        Package.open(folder)


def test_a_changed_large_file_is_found_by_checking_the_sums(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwenonnx.package.package.SMALL_FILE", 100_000)
    flip_byte(folder / "model.onnx.data")
    package = Package.open(folder)

    with pytest.raises(PackageError, match=r"model\.onnx\.data: the content does not match its sum"):
        package.check_sums()
    assert SMALL_FILE < 100 << 20  # reading the weights twice at every start would cost seconds


def test_checking_the_sums_reports_progress_up_to_the_size(folder: Path) -> None:
    package = Package.open(folder)
    calls: list[tuple[int, int]] = []

    package.check_sums(lambda done, total: calls.append((done, total)))

    assert calls == sorted(calls)
    assert calls[-1] == (package.bytes, package.bytes)


def test_a_folder_without_a_manifest_is_no_package(folder: Path) -> None:
    (folder / "qwenonnx.json").unlink()

    with pytest.raises(PackageError, match=r"package: not a package, there is no qwenonnx\.json in it"):
        Package.open(folder)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="nowhere: no such folder"):
        Package.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "\x00", '"text"', '{"format": 1}', '{"format": 1, "files": 3}']
)
def test_a_damaged_manifest_is_refused_in_one_sentence(text: str, folder: Path) -> None:
    (folder / "qwenonnx.json").write_text(text, encoding="utf-8")

    with pytest.raises(PackageError, match=r"qwenonnx\.json: .*again\.$") as caught:
        Package.open(folder)
    assert "\n" not in str(caught.value)


def test_a_manifest_that_is_no_utf8_is_refused(folder: Path) -> None:
    (folder / "qwenonnx.json").write_bytes(b'{"format": "\xff"}')

    with pytest.raises(PackageError, match=r"qwenonnx\.json: cannot be read"):
        Package.open(folder)


def test_a_format_from_the_future_is_refused_with_both_numbers(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest.update(format=99))

    with pytest.raises(PackageError, match="package format 99 is not 1"):
        Package.open(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 5),
        ("recipe", None),
        ("num_tokens", "383"),
        ("end_token_ids", "12"),
        ("inputs", {}),
        ("details", []),
        ("unheard_of", 1),
        ("model", "../x\n"),
        ("model", ""),
        ("context_length", 0),
        ("context_length", True),
        ("num_tokens", -1),
        ("num_tokens", 0),
        ("num_tokens", True),
        ("num_tokens", 10),
        ("end_token_ids", ["x"]),
        ("end_token_ids", [True]),
        ("end_token_ids", [-1]),
        ("end_token_ids", [383]),
        ("inputs", [1]),
        ("versions", {"onnx": 1}),
        ("files", {"model.onnx": {"bytes": True, "sha256": "00"}}),
        ("files", {"model.onnx": {"bytes": -1, "sha256": "00"}}),
        ("files", {"model.onnx": {"bytes": "12", "sha256": "00"}}),
        ("files", {"model.onnx": {"bytes": 12}}),
        ("files", {"../other/model.onnx": {"bytes": 12, "sha256": "00"}}),
        ("files", {"/model.onnx": {"bytes": 12, "sha256": "00"}}),
        ("files", {"onnx//model.onnx": {"bytes": 12, "sha256": "00"}}),
        ("model_file", 3),
        ("data_files", "model.onnx.data"),
        ("data_files", [1]),
    ],
)
def test_a_wrong_field_of_the_manifest_is_refused(field: str, value: object, folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest.update({field: value}))

    with pytest.raises(PackageError, match=r"qwenonnx\.json: damaged manifest"):
        Package.open(folder)


@pytest.mark.parametrize(
    "name", ["model.onnx", "model.onnx.data", "config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_a_manifest_lists_every_file_that_serving_needs(name: str, folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest["files"].pop(name))

    with pytest.raises(PackageError, match=f"package: its manifest does not list {name};"):
        Package.open(folder)


@pytest.mark.parametrize("field", ["num_tokens", "context_length"])
def test_a_manifest_does_not_promise_more_than_the_model_has(field: str, folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest.update({field: 1_000_000_000}))

    with pytest.raises(PackageError, match=r"1,000,000,000.*, more than the 512 and 2,048 of config\.json"):
        Package.open(folder)


def test_a_manifest_without_names_of_graph_and_weights_has_the_usual_ones(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: (manifest.pop("model_file"), manifest.pop("data_files")))

    package = Package.open(folder)
    assert package.model_path == folder / "model.onnx"
    assert package.data_paths == (folder / "model.onnx.data",)


def test_graph_and_weights_may_lie_in_a_folder_of_the_package(folder: Path) -> None:
    (folder / "onnx").mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        (folder / name).rename(folder / "onnx" / name)

    def move(manifest: dict[str, Any]) -> None:
        manifest.update(model_file="onnx/model.onnx", data_files=["onnx/model.onnx.data"])
        manifest["files"] = {
            f"onnx/{name}" if name.startswith("model") else name: entry for name, entry in manifest["files"].items()
        }

    edit_manifest(folder, move)
    assert package_runner(Package.open(folder)).prefill(0, TOKENS, 0).shape == (512,)


def test_a_recipe_of_another_version_is_accepted(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest.update(recipe="bogus"))

    assert Package.open(folder).manifest.recipe == "bogus"


def test_a_folder_whose_name_is_no_text_is_refused(folder: Path) -> None:
    odd = folder.rename(folder.with_name("p\udcff"))

    with pytest.raises(PackageError, match=r"p\\xff: this path is not UTF-8"):
        Package.open(odd)


@pytest.mark.parametrize("field", ["model", "context_length", "files", "outputs", "source"])
def test_a_missing_field_of_the_manifest_is_named(field: str, folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest.pop(field))

    with pytest.raises(PackageError, match=f"damaged manifest .*{field}"):
        Package.open(folder)


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    manifest = Manifest(
        model="模型",
        graph="fused",
        recipe="int8",
        context_length=32_768,
        num_tokens=151_665,
        end_token_ids=(151_643, 151_645),
        inputs=("input_ids",),
        outputs=("logits",),
        source={"kind": "gguf", "bytes": 5},
        versions={"onnx": "1.0"},
        details={"a": {"b": [1, 2.5, None]}},
        files={"model.onnx": FileEntry(bytes=3, sha256="abc")},
    )
    (tmp_path / "qwenonnx.json").write_text(manifest.to_json(), encoding="utf-8")

    assert Manifest.read(tmp_path) == manifest


def test_a_package_in_a_blob_store_loads_through_its_links(tiny_fp32: Package, tmp_path: Path) -> None:
    snapshot = link_into_blobs(tiny_fp32.folder, tmp_path)

    package = Package.open(snapshot)
    package.check_sums()

    expected = package_runner(tiny_fp32).score(TOKENS, 0)
    np.testing.assert_array_equal(package_runner(package).score(TOKENS, 0), expected)


def test_a_linked_folder_loads(tiny_fp32: Package, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tiny_fp32.folder)

    assert package_runner(Package.open(tmp_path / "link")).prefill(0, TOKENS, 0).shape == (512,)


def test_data_linked_to_another_folder_is_refused_with_the_remedy(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(folder / "model.onnx.data", elsewhere / "weights")
    (folder / "model.onnx.data").symlink_to(elsewhere / "weights")

    with pytest.raises(
        PackageError, match=r"model\.onnx\.data: this is a symbolic link to .*put the file itself there"
    ):
        package_runner(Package.open(folder))


def test_a_graph_of_another_kind_is_refused(tiny_fp32: Package) -> None:
    other = replace(tiny_fp32, manifest=replace(tiny_fp32.manifest, graph="optimum"))

    with pytest.raises(PackageError, match="of the kind 'optimum'"):
        load_runner(other, SessionConfig(threads=1))


@pytest.mark.parametrize("context", [2049, 1, 0, -5])
def test_a_context_that_the_model_does_not_have_is_refused(context: int, tiny_fp32: Package) -> None:
    with pytest.raises(UsageError, match="context"):
        load_runner(tiny_fp32, SessionConfig(threads=1), context_length=context)


def test_opening_changes_nothing(folder: Path) -> None:
    before = contents(folder)

    package_runner(Package.open(folder)).prefill(0, TOKENS, 0)

    assert contents(folder) == before


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def link_into_blobs(folder: Path, root: Path) -> Path:
    """The layout of the hub's cache: files in blobs/ under their sums, links to them in snapshots/."""
    blobs, snapshot = root / "blobs", root / "snapshots" / "x"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        blob = blobs / f"{abs(hash(path.name)):x}"
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot
