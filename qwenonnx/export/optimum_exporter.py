"""From a checkpoint to an fp32 package through Optimum: the graph that most people's tools write and read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qwenonnx.checkpoint.base import Checkpoint
from qwenonnx.config import ModelConfig
from qwenonnx.errors import ExportError, NumericalError, VerificationError
from qwenonnx.evaluate.fidelity import Scorer
from qwenonnx.evaluate.parity import Parity, TokenText, compare_models
from qwenonnx.evaluate.texts import bundled_texts
from qwenonnx.export.intermediate import write_safetensors_folder
from qwenonnx.export.parts import fp32_manifest, write_text_files
from qwenonnx.export.torch_extra import TASK, TorchModel, optimum_versions, require_optimum, run_optimum
from qwenonnx.export.verify import MAX_LOGIT_DIFFERENCE, SAMPLE_TEXT, SAMPLE_TOKENS, verify_export
from qwenonnx.files import Progress, require_space, staged_folder
from qwenonnx.graph.names import past_names, present_names
from qwenonnx.graph.weights import WatchedWeights, fp32_bytes
from qwenonnx.package.manifest import MODEL_NAME
from qwenonnx.package.package import Package
from qwenonnx.package.writer import check_target, finish_package
from qwenonnx.runtime.portable_runner import PortableRunner
from qwenonnx.runtime.session import SessionConfig
from qwenonnx.text.tokenizer import Tokenizer

# The intermediate checkpoint and what Optimum writes on the way, as a multiple of the weights: measured 3.3.
ROOM = 3.5
SPARE_BYTES = 64 << 20
COMPARED_TEXTS = 8
COMPARED_TOKENS = 64


def export_through_optimum(
    checkpoint: Checkpoint,
    target: Path,
    *,
    model: str,
    stage: Callable[[str], Progress],
) -> Package:
    """Exports to `target` with Optimum, replacing a package that is there; on failure `target` stays as it was.

    Whatever the checkpoint's format is, Optimum reads a copy of it: fp32 safetensors and a normalized configuration, in
    a folder beside the result that is removed after. The graph is compared with the numpy reference, whole and in
    chunks, and with the checkpoint in PyTorch on eight texts. It takes about nine times the memory of an export
    without torch, 9 GB for a model of 0.5B.

    Raises:
        UsageError: the extra `optimum` is not there or of the wrong versions; found before anything is written.
        PackageError: `target` holds something else than a package.
        CheckpointError: the chat template cannot be used.
        DiskSpaceError: the result, or what is written on the way, does not fit.
        ExportError: Optimum failed, or wrote a graph without a KV cache.
        VerificationError: the graph does not compute what the checkpoint says.
    """
    require_optimum()
    config = checkpoint.config
    check_target(target)
    require_space(target, int(ROOM * fp32_bytes(config)) + SPARE_BYTES)
    with staged_folder(target) as folder:
        tokenizer = write_text_files(checkpoint, folder)
        work = folder / ".work"
        watched = WatchedWeights(checkpoint, config, stage("writing the checkpoint for Optimum"))
        write_safetensors_folder(watched, config, checkpoint.hf_config, work / "checkpoint")
        stage("exporting with Optimum")
        run_optimum(work / "checkpoint", work / "output")
        inputs, outputs, data_files = _describe_graph(work / "output" / MODEL_NAME, config)
        for name in (MODEL_NAME, *data_files):
            (work / "output" / name).rename(folder / name)
            (folder / name).chmod(0o666 & ~_umask())  # Optimum's data file is for its owner alone
        shutil.rmtree(work)
        runner = PortableRunner(folder / MODEL_NAME, config, SessionConfig.for_one_run(), context_length=SAMPLE_TOKENS)
        watched = WatchedWeights(checkpoint, config, stage("checking the graph"))
        verification = verify_export(runner, folder, config, watched, tokenizer.encode(SAMPLE_TEXT))
        parity = _compare_with_torch(checkpoint, runner, folder, tokenizer, stage("comparing with PyTorch"))
        stage("summing the files")
        finish_package(
            folder,
            fp32_manifest(
                checkpoint,
                tokenizer,
                model=model,
                graph="portable",
                inputs=inputs,
                outputs=outputs,
                versions=optimum_versions(),
                data_files=data_files,
                details={
                    "exporter": "optimum",
                    "task": TASK,
                    "verification": asdict(verification),
                    "pytorch": {"texts": COMPARED_TEXTS, **parity.to_json()},
                },
            ),
        )
    return Package.open(target)


def _describe_graph(path: Path, config: ModelConfig) -> tuple[list[str], list[str], list[str]]:
    """Names of the inputs, of the outputs, and of the data files of a graph that Optimum wrote.

    Raises:
        ExportError: there is no such graph, it has no KV cache, or its data lies elsewhere.
    """
    import onnx

    if not path.is_file():
        raise ExportError(f"Optimum wrote no {path.name}; export the checkpoint without --exporter optimum.")
    model = onnx.load(str(path), load_external_data=False)
    inputs = [value.name for value in model.graph.input]
    outputs = [value.name for value in model.graph.output]
    missing = [
        *(name for name in ("input_ids", "attention_mask", *past_names(config)) if name not in inputs),
        *(name for name in ("logits", *present_names(config)) if name not in outputs),
    ]
    if missing:
        raise ExportError(
            f"Optimum wrote a graph without {missing[0]}, so it cannot go on from a KV cache; use the versions that "
            "constraints.txt has, or export without --exporter optimum."
        )
    data_files = sorted(_locations(model.graph.initializer))
    if strange := [name for name in data_files if name != Path(name).name or not (path.parent / name).is_file()]:
        raise ExportError(f"Optimum's graph has weights in {strange[0]}, which is not beside it.")
    return inputs, outputs, data_files


def _locations(tensors: Sequence[Any]) -> set[str]:
    """Files that hold the values of external tensors."""
    return {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}


def _compare_with_torch(
    checkpoint: Checkpoint, runner: Scorer, folder: Path, tokenizer: Tokenizer, progress: Progress
) -> Parity:
    """Compares the graph with the checkpoint in PyTorch on the beginnings of eight of the bundled texts.

    Raises:
        VerificationError: a likeliest token is another one, or a logit differs by more than rounding.
    """
    texts = bundled_texts()
    chosen = texts[:: len(texts) // COMPARED_TEXTS][:COMPARED_TEXTS]
    length = min(COMPARED_TOKENS, checkpoint.config.context_length)
    encoded = [TokenText(text.name, tuple(tokenizer.encode(text.text)[:length])) for text in chosen]
    try:
        results = compare_models(TorchModel(checkpoint), runner, encoded, progress)
    except NumericalError as error:
        raise VerificationError(f"{folder}: the exported graph fails its check: {error}") from error
    parity = sum(results, Parity())
    if not parity.holds(MAX_LOGIT_DIFFERENCE):
        raise VerificationError(
            f"{folder}: the exported graph differs from PyTorch: same likeliest token at {parity.same} of "
            f"{parity.positions} positions, largest logit difference {parity.largest_difference:.2e} at position "
            f"{parity.position} of {parity.text}; use the versions that constraints.txt has."
        )
    return parity


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
