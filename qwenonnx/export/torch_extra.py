"""What needs the extra `optimum`: Optimum's exporter, and the model in PyTorch. Nothing else imports torch."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenonnx.checkpoint.base import Checkpoint
from qwenonnx.checkpoint.layout import EMBEDDING, HEAD, expected_shapes
from qwenonnx.errors import ExportError, UsageError

INSTALL = "pip install 'qwenonnx[optimum]'"
TASK = "text-generation-with-past"
# What the extra brings, each with the first version and the first that is too new.
TORCH = ("torch", (2, 6), None)
TRANSFORMERS = ("transformers", (4, 51), (4, 58))
NEEDED: tuple[tuple[str, tuple[int, ...], tuple[int, ...] | None], ...] = (
    TORCH,
    TRANSFORMERS,
    ("optimum", (2, 1), None),
    ("optimum-onnx", (0, 1), None),
    ("accelerate", (1, 0), None),
)


def require_optimum() -> None:
    """Checks that Optimum's exporter can be used; the versions are checked before anything large is imported.

    Raises:
        UsageError: a part of the extra is missing, has an unsuitable version, or cannot be imported.
    """
    _require("exporting through Optimum", NEEDED)
    _import_all(("torch", "optimum.exporters.onnx"))


def require_torch() -> None:
    """Checks that a checkpoint can be run in PyTorch.

    Raises:
        UsageError: torch is missing, too old, or cannot be imported.
    """
    _require("running a checkpoint in PyTorch", (TORCH,))
    _import_all(("torch",))


def optimum_versions() -> dict[str, str]:
    """Versions of the packages that shape what Optimum writes."""
    return {name: metadata.version(name) for name in ("torch", "transformers", "optimum", "optimum-onnx")}


def run_optimum(checkpoint: Path, output: Path) -> None:
    """Exports a folder that transformers can read into `output`, as one graph with a growing KV cache.

    Of what appears in `output`, model.onnx and the data file that it names are the result. Optimum's post-processing
    stores a tied matrix once; its own validation is left out, the result being compared with more than it does.

    Raises:
        ExportError: Optimum failed; the message carries its reason.
    """
    with _silenced():
        from optimum.exporters.onnx import main_export
        from transformers.utils import logging as transformers_logging

        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            main_export(
                str(checkpoint),
                str(output),
                task=TASK,
                device="cpu",
                dtype="fp32",
                library_name="transformers",
                framework="pt",
                local_files_only=True,
                do_validation=False,
            )
        except Exception as error:
            if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
                raise  # the system's, such as a full disk; transformers raises others for files that it cannot use
            raise ExportError(
                f"Optimum could not export the checkpoint ({reason(error)}); export it without --exporter optimum."
            ) from error
        finally:
            if bars:
                transformers_logging.enable_progress_bar()
            gc.collect()  # the traced model is held by cycles


class TorchModel:
    """A checkpoint in PyTorch with transformers' Qwen2, in fp32 on the CPU; gives logits as a package's runner does.

    Raises:
        UsageError: see `require_torch`.
    """

    def __init__(self, checkpoint: Checkpoint, threads: int | None = None) -> None:
        require_torch()
        with _silenced():
            import torch
            from transformers import Qwen2Config, Qwen2ForCausalLM

            if threads is not None:
                torch.set_num_threads(threads)
            config = Qwen2Config(**checkpoint.config.to_hf())
            with torch.device("meta"):
                model = Qwen2ForCausalLM(config)
            names = expected_shapes(checkpoint.config)
            state = {name: torch.from_numpy(np.ascontiguousarray(checkpoint.tensor(name))) for name in names}
            state.setdefault(HEAD, state[EMBEDDING])
            model.load_state_dict(state, assign=True)
            model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its table is no weight
        self._torch = torch
        self._model = model.eval()
        self._cache: Any = None
        self._length = 0

    def score(self, token_ids: Sequence[int], start: int) -> NDArray[np.float32]:
        """Logits `[n, vocab]` of tokens at positions `[start, start + n)`.

        Raises:
            UsageError: `start` is neither 0 nor the end of what was run last.
        """
        if start not in (0, self._length):
            raise UsageError(f"the model in PyTorch is at position {self._length}, so it cannot go on at {start}.")
        with _silenced(), self._torch.inference_mode():
            result = self._model(
                self._torch.tensor([list(token_ids)]), past_key_values=self._cache if start else None, use_cache=True
            )
        self._cache, self._length = result.past_key_values, start + len(token_ids)
        return np.asarray(result.logits[0].numpy(), dtype=np.float32)


def reason(error: Exception) -> str:
    """The text of somebody else's error on one line, of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:299]}…"


def _require(what: str, needed: Sequence[tuple[str, tuple[int, ...], tuple[int, ...] | None]]) -> None:
    missing, unsuitable = [], []
    for name, low, high in needed:
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        version = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
        if version < low or (high is not None and version >= high):
            bound = f"<{_dotted(high)}" if high is not None and version >= high else f">={_dotted(low)}"
            unsuitable.append(f"{name}{bound} (version {found} is installed)")
    if missing:
        raise UsageError(f"{what} needs {', '.join(missing)}, not installed here; install the extra: {INSTALL}")
    if unsuitable:
        raise UsageError(f"{what} needs {', '.join(unsuitable)}; install the versions of the extra: {INSTALL}")


def _import_all(modules: Sequence[str]) -> None:
    import importlib

    # Read when torch is loaded. By default its threads spin while they wait for each other, which makes it several
    # times slower where anything else runs on the machine, onnxruntime in the same process for one.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with _silenced():
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception as error:  # a damaged installation can fail in any way
                raise UsageError(
                    f"{name} is installed but cannot be imported ({reason(error)}); install the extra again: {INSTALL}"
                ) from error


def _dotted(version: Sequence[int]) -> str:
    return ".".join(str(part) for part in version)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Keeps the warnings and logs of torch, transformers and Optimum from the terminal; errors are raised all the same.

    They set their loggers' levels when they are imported, so only switching off logging as a whole keeps them silent.
    """
    before = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)
