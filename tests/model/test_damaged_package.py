"""The real int8 package, damaged in ways that leave it loadable, is not served."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qwenonnx.package.manifest import DATA_NAME
from qwenonnx.package.package import Package

pytestmark = pytest.mark.model

BLOCK = 4096


@pytest.fixture
def copy(model_checkpoint: Path, tmp_path: Path) -> Path:
    """The package with a data file of its own; the other files are links."""
    source = Package.open(model_checkpoint.parents[1] / "int8").folder
    target = tmp_path / "int8"
    target.mkdir()
    for path in source.iterdir():
        if path.name == DATA_NAME:
            shutil.copyfile(path, target / path.name)
        else:
            link_or_copy(path, target / path.name)
    return target


def link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def flip_a_sign(data: Path) -> None:
    with data.open("r+b") as file:
        file.seek(data.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x80]))


def zero_a_block(data: Path) -> None:
    with data.open("r+b") as file:
        file.seek(data.stat().st_size // 2 // BLOCK * BLOCK)
        assert any(file.read(BLOCK))
        file.seek(-BLOCK, os.SEEK_CUR)
        file.write(bytes(BLOCK))


def truncate(data: Path) -> None:
    with data.open("r+b") as file:
        file.truncate(data.stat().st_size - BLOCK)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_a_sign, "the content does not match its sum in the manifest"),
        (zero_a_block, "the content does not match its sum in the manifest"),
        (truncate, "bytes, but the manifest says"),
    ],
)
def test_a_damaged_package_is_refused_with_the_reason(damage: Callable[[Path], None], reason: str, copy: Path) -> None:
    damage(copy / DATA_NAME)

    command = [sys.executable, "-m", "qwenonnx", "serve", str(copy), "--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert result.returncode == 1, result.stderr
    assert f"{copy / DATA_NAME}: " in result.stderr
    assert reason in result.stderr
    assert "Ready" not in result.stderr
    assert "Traceback" not in result.stderr
