"""From a checkpoint to an fp32 package: write the graph, check it, put it in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from qwenonnx.checkpoint.base import Checkpoint
from qwenonnx.export.template import check_chat_template
from qwenonnx.export.verify import SAMPLE_TEXT, verify_export
from qwenonnx.files import Progress, require_space, staged_folder
from qwenonnx.graph.builder import GraphBuilder
from qwenonnx.graph.decoder import write_decoder
from qwenonnx.graph.linear import FloatLinears
from qwenonnx.graph.names import STEP_INPUTS, past_names, present_names
from qwenonnx.graph.weights import WatchedWeights, fp32_bytes
from qwenonnx.package.manifest import DATA_NAME, MODEL_NAME, Manifest, clean_name
from qwenonnx.package.package import Package
from qwenonnx.package.writer import check_target, compact_json, finish_package, tool_versions, write_json
from qwenonnx.runtime.session import SessionConfig
from qwenonnx.text.tokenizer import Tokenizer, end_token_ids

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
        checkpoint.write_tokenizer(folder)
        compact_json(folder / "tokenizer.json")
        write_json(folder / "config.json", checkpoint.hf_config)
        write_json(folder / "generation_config.json", checkpoint.generation_config)
        tokenizer = Tokenizer.load(folder)
        check_chat_template(folder, tokenizer)
        weights = WatchedWeights(checkpoint, config, stage("writing the graph"))
        with GraphBuilder(folder / MODEL_NAME, folder / DATA_NAME) as g:
            write_decoder(g, config, weights, FloatLinears())
            g.save("qwen2", {"recipe": "fp32"})
        sample = tokenizer.encode(SAMPLE_TEXT)
        watched = WatchedWeights(checkpoint, config, stage("checking the graph"))
        verification = verify_export(
            folder / MODEL_NAME,
            config,
            watched,
            [min(token, config.vocab_size - 1) for token in sample],
            SessionConfig.for_one_run(),
        )
        stage("summing the files")
        finish_package(
            folder,
            Manifest(
                model=clean_name(model),
                graph="fused",
                recipe="fp32",
                context_length=config.context_length,
                num_tokens=tokenizer.num_tokens,
                end_token_ids=tuple(sorted(end_token_ids(tokenizer, checkpoint.generation_config))),
                inputs=(*STEP_INPUTS, *past_names(config)),
                outputs=("logits", *present_names(config)),
                source=asdict(checkpoint.source()),
                versions=tool_versions(),
                details={"exporter": "fused", "verification": asdict(verification)},
            ),
        )
    return Package.open(target)
