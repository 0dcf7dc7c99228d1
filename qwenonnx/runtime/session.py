"""The onnxruntime session that runs a package, with settings chosen for decoding on few cores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwenonnx.errors import PackageError
from qwenonnx.runtime.cpu import allowed_threads
from qwenonnx.runtime.exactness import make_products_exact
from qwenonnx.runtime.ort import load_onnxruntime


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Settings of the session.

    `threads` is always given to onnxruntime explicitly: its own default ignores container quotas and tries to pin
    threads to cores that may not be there. `spin_us` bounds how long an idle pool thread spins before it sleeps;
    without a bound an idle server burns a core for many milliseconds after each step, and with 0 each of the
    hundreds of kernels of a step pays for waking a thread. `prepack` rearranges the weights for the CPU at load time,
    into memory of their own.
    """

    threads: int
    spin_us: int = 1000
    parallel: bool = False
    inter_op_threads: int = 1
    prepack: bool = True
    profile_prefix: Path | None = None

    @classmethod
    def for_this_machine(cls) -> SessionConfig:
        """As many threads as this process may use, everything else by default."""
        return cls(threads=allowed_threads())

    @classmethod
    def for_one_run(cls) -> SessionConfig:
        """For a few runs only: weights are used as they lie in the file, so loading is quick and takes no memory."""
        return cls(threads=allowed_threads(), prepack=False)


def session_options(config: SessionConfig) -> Any:
    """The onnxruntime SessionOptions for `config`."""
    ort = load_onnxruntime()

    options = ort.SessionOptions()
    options.intra_op_num_threads = config.threads
    options.inter_op_num_threads = config.inter_op_threads
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL if config.parallel else ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    # A memory plan is kept for every shape seen; prompt chunks come in all lengths, so memory would only grow.
    options.enable_mem_pattern = False
    # What fails is raised, and said once by whoever handles it; the library would print it as well.
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if config.spin_us else "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    if config.spin_us:
        # Understood from onnxruntime 1.31 on.
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(config.spin_us))
    if not config.prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if config.profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(config.profile_prefix)
    return options


def open_session(model_path: Path, config: SessionConfig) -> Any:
    """Loads a model.

    Raises:
        PackageError: onnxruntime cannot load it; the message carries its reason.
    """
    ort = load_onnxruntime()

    options = session_options(config)
    make_products_exact(options)
    try:
        return ort.InferenceSession(str(model_path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base class
        reason = " ".join(str(error).split())
        raise PackageError(f"{model_path}: onnxruntime cannot load it ({reason}); make the package again.") from error
