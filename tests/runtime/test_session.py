"""Settings of the onnxruntime session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnxruntime as ort
import pytest

from qwenonnx.errors import PackageError
from qwenonnx.package.package import Package
from qwenonnx.runtime.load import session_config
from qwenonnx.runtime.session import SessionConfig, open_session, session_options

SPINNING = "session.intra_op.allow_spinning"
DURATION = "session.intra_op.spin_duration_us"


def test_threads_are_explicit_and_operators_run_one_after_the_other() -> None:
    options = session_options(SessionConfig(threads=3))

    assert options.intra_op_num_threads == 3
    assert options.inter_op_num_threads == 1
    assert options.execution_mode == ort.ExecutionMode.ORT_SEQUENTIAL
    assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    assert not options.enable_mem_pattern


def test_spinning_is_bounded_and_can_be_turned_off() -> None:
    bounded = session_options(SessionConfig(threads=2))
    off = session_options(SessionConfig(threads=2, spin_us=0))

    assert bounded.get_session_config_entry(SPINNING) == "1"
    assert 0 < int(bounded.get_session_config_entry(DURATION)) <= 1000
    assert off.get_session_config_entry(SPINNING) == "0"
    for options in (bounded, off):
        assert options.get_session_config_entry("session.inter_op.allow_spinning") == "0"


def test_parallel_execution_is_offered() -> None:
    options = session_options(SessionConfig(threads=1, parallel=True, inter_op_threads=2))

    assert options.execution_mode == ort.ExecutionMode.ORT_PARALLEL
    assert options.inter_op_num_threads == 2


def test_for_one_run_leaves_the_weights_as_they_lie() -> None:
    options = session_options(SessionConfig.for_one_run())

    assert options.get_session_config_entry("session.disable_prepacking") == "1"
    assert options.intra_op_num_threads > 0


def test_an_explicit_number_of_threads_beats_what_was_found() -> None:
    assert session_config(7).threads == 7
    assert session_config().threads == SessionConfig.for_this_machine().threads > 0


def test_a_profile_is_written_where_asked(tiny_fp32: Package, tmp_path: Path) -> None:
    session = open_session(tiny_fp32.model_path, SessionConfig(threads=1, profile_prefix=tmp_path / "profile"))

    assert Path(session.end_profiling()).parent == tmp_path


@pytest.mark.parametrize("content", [b"", b"junk", None], ids=["empty", "junk", "cut short"])
def test_a_damaged_model_file_is_one_sentence(
    content: bytes | None, tiny_fp32: Package, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(tiny_fp32.model_path.read_bytes()[:5000] if content is None else content)

    with pytest.raises(
        PackageError, match=r"model\.onnx: onnxruntime cannot load it \(.+\); make the package"
    ) as caught:
        open_session(path, SessionConfig(threads=1))

    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks")
def test_a_process_held_to_one_core_runs_without_complaint(tiny_fp32: Package) -> None:
    script = """
import os, sys
from pathlib import Path
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
from qwenonnx.package.package import Package
from qwenonnx.runtime.load import load_runner, session_config
config = session_config()
load_runner(Package.open(Path(sys.argv[1])), config, context_length=8).prefill(0, [1, 2, 3], 0)
print(config.threads)
"""
    command = [sys.executable, "-c", script, str(tiny_fp32.folder)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == "1"
    assert done.stderr == ""


def test_nothing_is_written_to_the_home_folder(tiny_int8: Package, tmp_path: Path) -> None:
    """Onnxruntime's telemetry keeps a database there unless it is switched off before the import."""
    command = [sys.executable, "-m", "qwenonnx", "bench", str(tiny_int8.folder), "--quiet"]
    options = ["--prompt", "3", "--new-tokens", "2", "--repeats", "1"]
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}

    subprocess.run([*command, *options], env={**environment, "HOME": str(tmp_path)}, check=True, capture_output=True)

    assert list(tmp_path.iterdir()) == []
