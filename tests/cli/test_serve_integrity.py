"""Damaged packages are refused while they are being loaded, and what `serve` says of a package's fidelity."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from packages import ONE_THREAD
from typer.testing import CliRunner

import qwenonnx.engine.load as loading
import qwenonnx.files as files
import qwenonnx.package.package as packages_module
import qwenonnx.server.run as running
from qwenonnx.cli.console import describe_gate
from qwenonnx.cli.main import app
from qwenonnx.engine.load import LoadedModel, load_model
from qwenonnx.errors import PackageError, UsageError
from qwenonnx.package.manifest import MANIFEST_NAME
from qwenonnx.package.package import Package
from qwenonnx.server.config import ServeConfig
from qwenonnx.server.served import Served

Damage = Callable[[Path], None]


def flip_a_sign(data: Path) -> None:
    """Changes the sign of one 8-bit weight, in the middle."""
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 0x80
    data.write_bytes(content)


def zero_a_block(data: Path) -> None:
    content = bytearray(data.read_bytes())
    start = len(content) // 2
    assert any(content[start : start + 64])
    content[start : start + 64] = bytes(64)
    data.write_bytes(content)


def truncate(data: Path) -> None:
    with data.open("r+b") as file:
        file.truncate(data.stat().st_size * 2 // 3)


DAMAGES = [flip_a_sign, zero_a_block, truncate]


@pytest.fixture
def copy(tiny_int8: Package, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_int8.folder, tmp_path / "int8")


@pytest.mark.parametrize("damage", DAMAGES)
def test_data_that_was_damaged_since_the_package_was_opened_is_refused(damage: Damage, copy: Path) -> None:
    package = Package.open(copy)
    damage(package.data_paths[0])

    with pytest.raises(PackageError, match=r"int8/model\.onnx\.data: the content does not match its sum"):
        load_model(package, ONE_THREAD)


def test_a_damaged_file_explains_what_fails_because_of_it(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise PackageError("something obscure")

    monkeypatch.setattr(loading, "load_runner", fail)
    package = Package.open(copy)
    with pytest.raises(PackageError, match="something obscure"):
        load_model(package, ONE_THREAD)

    flip_a_sign(package.data_paths[0])

    with pytest.raises(PackageError, match="does not match its sum"):
        load_model(package, ONE_THREAD)
    with pytest.raises(PackageError, match="something obscure"):
        load_model(package, ONE_THREAD, check=False)


def test_what_a_user_gets_wrong_is_still_said(copy: Path) -> None:
    with pytest.raises(UsageError, match="context of 1,000,000 tokens is too long"):
        load_model(Package.open(copy), ONE_THREAD, context_length=1_000_000)


@pytest.mark.parametrize("damage", DAMAGES)
def test_serve_refuses_a_damaged_package_and_names_the_file(damage: Damage, copy: Path) -> None:
    damage(copy / "model.onnx.data")

    result = CliRunner().invoke(app, ["serve", str(copy), "--port", "0"])

    assert result.exit_code == 1
    assert f"{copy / 'model.onnx.data'}: " in result.stderr
    assert re.search("does not match its sum|but the manifest says", result.stderr)
    assert len(result.stderr.splitlines()) == 1


class Loaded:
    """Takes the server's place: loads what would be served, and leaves."""

    def __init__(self) -> None:
        self.served: Served | None = None

    def __call__(self, load: Callable[[], Served], config: ServeConfig) -> int:
        self.served = load()
        return 0


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Loaded:
    loaded = Loaded()
    monkeypatch.setattr(running, "serve", loaded)
    return loaded


def test_large_files_are_checked_while_loading_unless_that_is_switched_off(
    copy: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages_module, "SMALL_FILE", 0)  # so that opening looks at sizes only
    flip_a_sign(copy / "model.onnx.data")

    refused = CliRunner().invoke(app, ["serve", str(copy), "--threads", "1"])
    taken = CliRunner().invoke(app, ["serve", str(copy), "--threads", "1", "--no-check"])

    assert refused.exit_code == 1
    assert "model.onnx.data: the content does not match its sum in the manifest" in refused.stderr
    assert taken.exit_code == 0, taken.stderr
    assert loaded.served is not None
    assert loaded.served.info["integrity_checked"] is False


def with_gate(folder: Path, gate: dict[str, Any] | None) -> None:
    """Puts another result of the gate into a package's manifest."""
    path = folder / MANIFEST_NAME
    values = json.loads(path.read_text(encoding="utf-8"))
    values["details"].pop("gate", None)
    if gate is not None:
        values["details"]["gate"] = gate
    path.write_text(json.dumps(values), encoding="utf-8")


PASSED = {
    "passed": True,
    "failure": None,
    "kl_mean": 0.00286,
    "top1_agreement": 0.9628,
    "positions": 1344,
    "perplexity": 56.93,
    "reference_perplexity": 56.86,
}
FAILED = {**PASSED, "passed": False, "failure": "its mean KL from the input is 0.5000, above the limit of 0.006"}


@pytest.mark.parametrize(
    ("gate", "summary", "warnings"),
    [
        (PASSED, "Recipe int8: passed the gate (mean KL 0.0029 from its input, same likeliest token at 96.3%", None),
        (FAILED, None, "Recipe int8: FAILED the gate: its mean KL from the input is 0.5000, above the limit"),
        ({"passed": False, "failure": "its logits are unusable"}, None, "Recipe int8: FAILED the gate: its logits"),
        (None, "Recipe int8: its fidelity was not measured", None),
    ],
)
def test_what_the_gate_has_found_is_said_and_shown(
    gate: dict[str, Any] | None, summary: str | None, warnings: str | None, copy: Path, loaded: Loaded
) -> None:
    with_gate(copy, gate)

    result = CliRunner().invoke(app, ["serve", str(copy), "--threads", "1"])

    assert result.exit_code == 0, result.stderr
    served = loaded.served
    assert served is not None
    assert served.info["gate"] == gate
    assert served.info["integrity_checked"] is True
    for lines, expected in ((served.summary, summary), (served.warnings, warnings)):
        assert len(lines) == (expected is not None)
        assert not expected or lines[0].startswith(expected)


def test_an_fp32_package_is_said_to_be_none_that_was_quantized(tiny_fp32: Package, loaded: Loaded) -> None:
    CliRunner().invoke(app, ["serve", str(tiny_fp32.folder), "--threads", "1"])

    assert loaded.served is not None
    assert loaded.served.summary == ("Recipe fp32: not quantized",)
    assert loaded.served.info["gate"] is None


def test_a_gate_without_a_verdict_was_not_measured() -> None:
    assert describe_gate(None) == describe_gate({}) == "not measured"


def test_the_log_and_health_tell_of_the_gate(tiny_int8: Package) -> None:
    line = [sys.executable, "-m", "qwenonnx", "serve", str(tiny_int8.folder), "--port", "0", "--threads", "1"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        log = ""
        while "Ready: serving" not in log:
            log += (last := process.stderr.readline())
            assert last, log
        url = re.search(r"http://[\d.]+:\d+", log)
        assert url is not None
        health = httpx.get(f"{url[0]}/health").json()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)

    gate = tiny_int8.manifest.details["gate"]
    assert f"INFO Recipe int8: {describe_gate(gate)}\n" in log
    assert health["info"]["gate"] == gate
    assert health["info"]["integrity_checked"] is True


def test_loading_checks_every_file_of_the_manifest(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def sha256_file(path: Path, advance: Callable[[int], None] | None = None) -> str:
        seen.append(path)
        return files.sha256_file(path, advance)

    package = Package.open(copy)
    monkeypatch.setattr(packages_module, "sha256_file", sha256_file)
    model: LoadedModel = load_model(package, ONE_THREAD)

    assert sorted(path.name for path in seen) == sorted(model.package.manifest.files)
