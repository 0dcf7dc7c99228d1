"""From a checkpoint to an fp32 package: write the graph, check it, put it in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from qwenonnx.checkpoint.base import Checkpoint
from qwenonnx.export.parts import fp32_manifest, write_text_files
from qwenonnx.export.verify import SAMPLE_TEXT, SAMPLE_TOKENS, verify_export
from qwenonnx.files import Progress, require_space, staged_folder
from qwenonnx.graph.builder import GraphBuilder
from qwenonnx.graph.decoder import write_decoder
from qwenonnx.graph.linear import FloatLinears
from qwenonnx.graph.names import STEP_INPUTS, past_names, present_names
from qwenonnx.graph.weights import WatchedWeights, fp32_bytes
from qwenonnx.package.manifest import DATA_NAME, MODEL_NAME
from qwenonnx.package.package import Package
from qwenonnx.package.writer import check_target, finish_package
from qwenonnx.runtime.fused_runner import FusedRunner
from qwenonnx.runtime.session import SessionConfig

# Room for what is not weights: tables, tokenizer, the model file.
SPARE_BYTES = 64 << 20


def export_checkpoint(
    checkpoint: Checkpoint,
    target: Path,
    *,
    model: str,
    stage: Callable[[str], Progress],
) -> Package:
    """Exports to `target`, replacing a package that is there; on any failure `target` stays as it was.

    `model` is the name the package goes by, control characters being replaced; `stage` is called with a label when a
    stage begins and returns the callback for its progress.

    Raises:
        PackageError: `target` holds something else than a package.
        CheckpointError: the chat template cannot be used.
        DiskSpaceError: the result does not fit.
        VerificationError: the written graph does not compute what the checkpoint says.
    """
    config = checkpoint.config
    check_target(target)
    require_space(target, fp32_bytes(config) + SPARE_BYTES)
    with staged_folder(target) as folder:
        tokenizer = write_text_files(checkpoint, folder)
        weights = WatchedWeights(checkpoint, config, stage("writing the graph"))
        with GraphBuilder(folder / MODEL_NAME, folder / DATA_NAME) as g:
            write_decoder(g, config, weights, FloatLinears())
            g.save("qwen2", {"recipe": "fp32"})
        watched = WatchedWeights(checkpoint, config, stage("checking the graph"))
        runner = FusedRunner(folder / MODEL_NAME, config, SessionConfig.for_one_run(), context_length=SAMPLE_TOKENS)
        verification = verify_export(runner, folder, config, watched, tokenizer.encode(SAMPLE_TEXT))
        stage("summing the files")
        finish_package(
            folder,
            fp32_manifest(
                checkpoint,
                tokenizer,
                model=model,
                graph="fused",
                inputs=(*STEP_INPUTS, *past_names(config)),
                outputs=("logits", *present_names(config)),
                details={"exporter": "fused", "verification": asdict(verification)},
            ),
        )
    return Package.open(target)
