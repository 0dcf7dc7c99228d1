"""From a package on disk to a model in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qwenonnx.errors import PackageError, UsageError
from qwenonnx.graph.names import STEP_INPUTS
from qwenonnx.package.package import Package
from qwenonnx.runtime.fused_runner import FusedRunner
from qwenonnx.runtime.genai_runner import GenaiRunner
from qwenonnx.runtime.memory import release_file_pages
from qwenonnx.runtime.portable_runner import PortableRunner
from qwenonnx.runtime.session import SessionConfig


def session_config(threads: int | None = None) -> SessionConfig:
    """Session settings for this machine; `threads` overrides the number found."""
    config = SessionConfig.for_this_machine()
    return config if threads is None else replace(config, threads=threads)


PackageRunner = FusedRunner | PortableRunner | GenaiRunner
_RUNNERS: Mapping[str, type[FusedRunner] | type[PortableRunner] | type[GenaiRunner]] = {
    "fused": FusedRunner,
    "portable": PortableRunner,
    "genai": GenaiRunner,
}


def load_runner(
    package: Package, session: SessionConfig, *, context_length: int | None = None, num_slots: int = 1
) -> PackageRunner:
    """Loads a package's graph with a KV cache of `num_slots` rows of `context_length` tokens (default: the model's).

    Raises:
        PackageError: the package has a graph that this version cannot run, or onnxruntime cannot load it.
        UsageError: the context is longer than the model's.
    """
    kind = _RUNNERS.get(package.manifest.graph)
    if kind is None:
        raise PackageError(
            f"{package.folder}: its graph is of the kind {package.manifest.graph!r}, which this version cannot run."
        )
    if kind is FusedRunner and not set(STEP_INPUTS) <= set(package.manifest.inputs):
        raise PackageError(
            f"{package.folder}: an older version made it, and its graph takes other inputs; make the package again."
        )
    if context_length is not None and not 1 < context_length <= package.config.context_length:
        raise UsageError(
            f"a context of {context_length:,} tokens is too long: this model's is {package.config.context_length:,}."
        )
    _check_data_links(package)
    runner = kind(package.model_path, package.config, session, num_slots=num_slots, context_length=context_length)
    # The head was read once to be rearranged; as the embedding, only single rows of it are needed from now on.
    for path in package.data_paths:
        release_file_pages(path)
    return runner


def _check_data_links(package: Package) -> None:
    """Onnxruntime reads weights only from below the model file's folder, be it the link's or the real one."""
    for data in package.data_paths:
        real = data.resolve()
        if not any(real.is_relative_to(path.resolve().parent) for path in (package.model_path, package.folder / "_")):
            raise PackageError(
                f"{data}: this is a symbolic link to {real}, which onnxruntime refuses to follow; put the file itself "
                "there, or link the whole folder."
            )
