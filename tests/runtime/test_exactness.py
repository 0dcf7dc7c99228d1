"""Integer products: exact here, and made exact on a CPU without VNNI (emulated by qemu, from Debian's qemu-user)."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from packages import TOKENS, package_runner
from runtime_probe import probe_model

import qwenonnx.runtime
from qwenonnx.package.package import Package
from qwenonnx.runtime.exactness import EXACT_KEY, make_products_exact, products_are_exact

QEMU = shutil.which("qemu-x86_64")
needs_qemu = pytest.mark.skipif(
    QEMU is None or platform.machine() != "x86_64", reason="needs qemu-user on x86-64 to emulate an older CPU"
)
SCRIPT = """
import sys
from pathlib import Path
import numpy as np
import qwenonnx.runtime.session as session
from qwenonnx.package.package import Package
from qwenonnx.runtime.load import load_runner
if sys.argv[3] == "unprotected":
    session.make_products_exact = lambda options: None
runner = load_runner(Package.open(Path(sys.argv[1])), session.SessionConfig(threads=1), context_length=64)
np.save(sys.argv[2], runner.score([int(token) for token in sys.argv[4:]], 0))
"""


def logits_on_haswell(package: Package, out: Path, mode: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    command = [str(QEMU), "-cpu", "Haswell", sys.executable, "-c", SCRIPT, str(package.folder), str(out), mode]
    result = subprocess.run([*command, *map(str, TOKENS)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    logits: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = np.load(out)
    return logits


def test_the_probe_is_what_it_claims_to_be() -> None:
    assert (Path(qwenonnx.runtime.__file__).parent / "probe.onnx").read_bytes() == probe_model()


def test_options_for_exact_products_are_exact_here() -> None:
    options = ort.SessionOptions()
    options.add_session_config_entry(EXACT_KEY, "1")

    assert products_are_exact(options)


@pytest.mark.parametrize("exact", [True, False])
def test_the_exact_kernels_are_chosen_where_they_are_needed(
    exact: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("qwenonnx.runtime.exactness.products_are_exact", lambda: exact)
    options = ort.SessionOptions()

    make_products_exact(options)

    if exact:
        assert not caplog.records
    else:
        assert options.get_session_config_entry(EXACT_KEY) == "1"
        assert "no VNNI" in caplog.text


@needs_qemu
def test_a_cpu_without_vnni_computes_what_this_one_does(tiny_int8: Package, tmp_path: Path) -> None:
    expected = package_runner(tiny_int8).score(list(TOKENS), 0)

    protected = logits_on_haswell(tiny_int8, tmp_path / "a.npy", "protected")
    unprotected = logits_on_haswell(tiny_int8, tmp_path / "b.npy", "unprotected")

    assert np.abs(protected - expected).max() < 1e-3
    assert np.abs(unprotected - expected).max() > 0.05  # so this test could fail
