"""From a checkpoint to an fp32 package: checked before it is in place, and all or nothing."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from packages import TOKENS, contents, export_folder, names, no_progress, package_runner
from tiny import tiny_weights, write_safetensors, write_tiny_checkpoint, write_tiny_gguf

from qwenonnx.checkpoint.base import Checkpoint
from qwenonnx.checkpoint.open import open_checkpoint
from qwenonnx.errors import DiskSpaceError, PackageError, VerificationError
from qwenonnx.export.exporter import export_checkpoint
from qwenonnx.graph.weights import WatchedWeights
from qwenonnx.package.package import Package


class CorruptedOnce:
    """A checkpoint whose tensor `name` is wrong the first time it is read, which is when the graph is written."""

    def __init__(self, checkpoint: Checkpoint, name: str, factor: float) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self._factor = factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def tensor(self, name: str) -> NDArray[np.float32]:
        value = self._checkpoint.tensor(name)
        if name != self._name:
            return value
        self._name = ""
        return value * np.float32(self._factor)


def test_the_package_is_whole_and_says_where_it_is_from(tiny_fp32: Package) -> None:
    tiny_fp32.check_sums()
    manifest = tiny_fp32.manifest

    assert sorted(path.name for path in tiny_fp32.folder.iterdir()) == sorted([*manifest.files, "qwenonnx.json"])
    assert (manifest.model, manifest.recipe, manifest.graph) == ("tiny", "fp32", "fused")
    assert manifest.num_tokens == 383
    assert manifest.end_token_ids == (378, 380)
    assert manifest.source["kind"] == "safetensors"
    assert manifest.source["files"] == ["model.safetensors"]
    assert set(manifest.versions) == {"qwenonnx", "onnx", "onnxruntime"}
    check = manifest.details["verification"]
    assert check["positions"] == 64
    assert check["top1_agreement"] == 1
    assert check["max_logit_difference"] < 1e-3


def test_the_manifest_holds_no_path_and_no_time(tiny_checkpoint: Path, tiny_fp32: Package) -> None:
    text = (tiny_fp32.folder / "qwenonnx.json").read_text(encoding="utf-8")

    assert str(tiny_checkpoint.parent) not in text
    assert str(tiny_fp32.folder.parent) not in text
    strings = re.findall(r'"((?:[^"\\]|\\.)*)"', text)
    assert not [
        string for string in strings if string.startswith("/") or re.search(r"\d{4}-\d\d-\d\d|\d\d:\d\d", string)
    ]
    numbers = re.findall(r": (\d+)", text)
    assert all(int(number) < 1_000_000_000 for number in numbers)  # seconds since 1970


def test_exporting_twice_into_one_folder_gives_the_same_bytes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    export_folder(tiny_checkpoint, tmp_path / "out")
    first = contents(tmp_path / "out")

    export_folder(tiny_checkpoint, tmp_path / "out")

    assert contents(tmp_path / "out") == first
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ["F16", "BF16", "sharded", "gguf"])
def test_other_formats_of_the_same_weights_give_the_same_logits(kind: str, tiny_fp32: Package, tmp_path: Path) -> None:
    if kind == "gguf":
        checkpoint = write_tiny_gguf(tmp_path / "tiny.gguf")
    elif kind == "sharded":
        checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", shards=3)
    else:
        checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", dtype=kind)

    logits = package_runner(export_folder(checkpoint, tmp_path / "out")).score(TOKENS, 0)

    expected = package_runner(tiny_fp32).score(TOKENS, 0)
    # fp16 keeps 11 bits of each weight and bf16 8, logits being about 15 wide.
    tolerance = {"F16": 0.05, "BF16": 0.5}.get(kind, 1e-5)
    assert np.abs(logits - expected).max() < tolerance


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("model.layers.1.self_attn.o_proj.weight", -1),
        ("model.layers.0.self_attn.k_proj.bias", 0),
        ("model.norm.weight", 1.01),
        ("model.layers.0.mlp.up_proj.weight", float("nan")),
    ],
)
def test_a_graph_that_differs_from_its_checkpoint_is_refused(
    name: str, factor: float, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    export_folder(tiny_checkpoint, tmp_path / "out")
    before = contents(tmp_path)
    corrupted = CorruptedOnce(open_checkpoint(tiny_checkpoint), name, factor)

    with pytest.raises(VerificationError, match="fails its check: ") as caught:
        export_checkpoint(corrupted, tmp_path / "out", model="tiny", stage=no_progress)

    if not np.isnan(factor):
        for figure in ("largest logit difference", "same top token at", "mean KL"):
            assert figure in str(caught.value)
    assert contents(tmp_path) == before


def test_a_model_that_predicts_nothing_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "checkpoint", tied=False)
    weights = tiny_weights(0, json.loads((folder / "config.json").read_text()))
    weights["lm_head.weight"] *= np.float32(1e-3)
    write_safetensors(folder / "model.safetensors", weights)

    with pytest.raises(VerificationError, match="as good as uniform, so the head is wrong"):
        export_folder(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_with_a_short_context_can_be_exported(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "checkpoint", config={"max_position_embeddings": 32})

    assert export_folder(folder, tmp_path / "out").manifest.details["verification"]["positions"] == 32


def test_too_small_a_disk_is_found_before_anything_is_written(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 4321, 4321))

    with pytest.raises(DiskSpaceError, match=r"deep/out: not enough disk space: (\d+,)+\d+ bytes are needed and 4,321"):
        export_folder(tiny_checkpoint, tmp_path / "deep" / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("moment", ["first tensor", "last tensor", "manifest", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_leaves_the_old_package(
    code: int, moment: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_folder(tiny_checkpoint, tmp_path / "out")
    before = contents(tmp_path)
    full = OSError(code, os.strerror(code))

    def fail(*args: Any) -> Any:
        raise full

    if "tensor" in moment:
        limit = 1 if moment == "first tensor" else 25
        reads = iter(range(limit))
        tensor = WatchedWeights.tensor
        monkeypatch.setattr(
            WatchedWeights, "tensor", lambda self, name: tensor(self, name) if next(reads, None) is not None else fail()
        )
    else:
        place = {"manifest": "qwenonnx.package.writer.write_text", "fsync": "qwenonnx.files._fsync"}[moment]
        monkeypatch.setattr(place, fail)

    with pytest.raises(DiskSpaceError, match=r"out: the disk filled up while writing \([\d,]+ bytes were free"):
        export_folder(tiny_checkpoint, tmp_path / "out")
    assert contents(tmp_path) == before


def test_a_file_system_that_is_too_small_is_left_empty(
    small_file_system: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwenonnx.export.exporter.SPARE_BYTES", -400_000)

    with pytest.raises(DiskSpaceError, match="out: the disk filled up while writing"):
        export_folder(tiny_checkpoint, small_file_system / "out")
    assert not list(small_file_system.iterdir())


@pytest.mark.parametrize("kind", ["file", "link", "foreign"])
def test_what_is_no_package_is_not_overwritten(kind: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    if kind == "file":
        target.write_text("text")
    elif kind == "link":
        (tmp_path / "real").mkdir()
        target.symlink_to(tmp_path / "real")
    else:
        target.mkdir()
        (target / "thesis.txt").write_text("years of work")
    before = contents(tmp_path)

    with pytest.raises(PackageError, match="out: "):
        export_folder(tiny_checkpoint, target)
    assert contents(tmp_path) == before
    assert target.is_symlink() == (kind == "link")


def test_progress_goes_up_to_the_total_in_each_stage(tiny_checkpoint: Path, tmp_path: Path) -> None:
    calls: dict[str, list[tuple[int, int]]] = {}

    def stage(label: str) -> Any:
        seen = calls.setdefault(label, [])
        return lambda done, total: seen.append((done, total))

    export_checkpoint(open_checkpoint(tiny_checkpoint), tmp_path / "out", model="tiny", stage=stage)

    assert list(calls) == ["writing the graph", "checking the graph", "summing the files"]
    for label in ("writing the graph", "checking the graph"):
        assert calls[label] == sorted(calls[label])
        assert calls[label][-1][0] == calls[label][-1][1] > 400_000


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB of its own."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
