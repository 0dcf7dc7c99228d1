"""What every exporter puts into a package, whatever wrote the graph: text files and the manifest's entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qwenonnx.checkpoint.base import Checkpoint
from qwenonnx.export.template import check_chat_template
from qwenonnx.package.manifest import DATA_NAME, Manifest, clean_name
from qwenonnx.package.writer import compact_json, tool_versions, write_json
from qwenonnx.text.tokenizer import Tokenizer, end_token_ids


def write_text_files(checkpoint: Checkpoint, folder: Path) -> Tokenizer:
    """Writes the tokenizer's and configuration's files into `folder`, and loads the tokenizer from there.

    Raises:
        CheckpointError: the tokenizer or the chat template cannot be used.
    """
    checkpoint.write_tokenizer(folder)
    compact_json(folder / "tokenizer.json")
    write_json(folder / "config.json", checkpoint.hf_config)
    write_json(folder / "generation_config.json", checkpoint.generation_config)
    tokenizer = Tokenizer.load(folder)
    check_chat_template(folder, tokenizer)
    return tokenizer


def fp32_manifest(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    *,
    model: str,
    graph: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    details: Mapping[str, Any],
    versions: Mapping[str, str] | None = None,
    data_files: Sequence[str] = (DATA_NAME,),
) -> Manifest:
    """The manifest of an fp32 package, without its files; hashes the checkpoint's weights.

    `versions` are those of other tools that shaped the graph.
    """
    return Manifest(
        model=clean_name(model),
        graph=graph,
        recipe="fp32",
        context_length=checkpoint.config.context_length,
        num_tokens=tokenizer.num_tokens,
        end_token_ids=tuple(sorted(end_token_ids(tokenizer, checkpoint.generation_config))),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        source=asdict(checkpoint.source()),
        versions={**tool_versions(), **(versions or {})},
        details=details,
        data_files=tuple(data_files),
    )
