"""From a folder that somebody else exported to a package, by writing a manifest into it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwenonnx.adopt.candidates import choose_graph
from qwenonnx.adopt.graph_file import GraphFile
from qwenonnx.adopt.trial import Trial, try_graph
from qwenonnx.checkpoint.weight_files import folder_name
from qwenonnx.errors import PackageError
from qwenonnx.files import Progress, is_utf8, printable
from qwenonnx.package.configuration import CONFIG, GENERATION_CONFIG, Configuration
from qwenonnx.package.genai_config import GENAI_CONFIG
from qwenonnx.package.manifest import MANIFEST_NAME, Manifest, clean_name
from qwenonnx.package.package import Package
from qwenonnx.package.writer import ADOPTED, finish_package, tool_versions
from qwenonnx.runtime.load import load_runner
from qwenonnx.runtime.session import SessionConfig
from qwenonnx.text.chat_template import ChatTemplate
from qwenonnx.text.tokenizer import Tokenizer, end_token_ids

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
TEMPLATE_FILE = "chat_template.jinja"
# Of all kinds of such folders; those that are there are part of the package.
TEXT_FILES = (CONFIG, GENAI_CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES, TEMPLATE_FILE)
TRIAL_CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Adoption:
    """The new package, the graphs of the folder that were not taken, and whether there is a chat template."""

    package: Package
    others: tuple[str, ...]
    has_chat_template: bool


def adopt_folder(
    folder: Path, *, file: str | None = None, name: str | None = None, stage: Callable[[str], Progress]
) -> Adoption:
    """Makes a folder with ONNX graphs a package: checks one of them, runs it, and writes `qwenonnx.json`.

    Nothing else is written. A manifest of an earlier adoption is replaced when all checks have passed. `file` is the
    graph (see `choose_graph` for the default) and `name` the model's name (the folder's).

    Raises:
        UsageError: `file` is not there.
        PackageError: the folder cannot be written to or is this program's own package, files are missing or do not
            belong together, or the graph cannot be run or gives nonsense.
        CheckpointError: the configuration is of another kind of model.
    """
    _check_folder(folder)
    choice = choose_graph(folder, file)
    texts = _text_files(folder)
    configuration = Configuration.read(folder, texts)
    tokenizer = Tokenizer.load(folder)
    _check_tokenizer(folder, tokenizer, configuration)
    template = ChatTemplate.load(folder, tokenizer)
    stage("reading the graph")
    graph = GraphFile.read(folder, choice.taken)
    draft = Package(
        folder=folder,
        manifest=_manifest(folder, name, choice.taken, graph, configuration, tokenizer),
        config=configuration.model,
        generation_config=configuration.generation,
    )
    stage("running the graph")
    trial = _try(draft, tokenizer)
    stage("summing the files")
    manifest = _with_details(draft.manifest, graph, trial)
    try:
        finish_package(folder, manifest, (choice.taken, *graph.data_files, *texts))
    except PermissionError as error:
        raise PackageError(_not_writable(folder)) from error
    return Adoption(Package.open(folder), choice.others, template.available)


def _check_folder(folder: Path) -> None:
    if not is_utf8(folder):  # ONNX Runtime takes paths as text
        raise PackageError(f"{printable(folder)}: this path is not UTF-8; rename the folder.")
    if not folder.is_dir():
        what = "this is a file" if folder.exists() else "there is no such folder"
        raise PackageError(f"{folder}: {what}; name the folder that another program exported.")
    path = folder / MANIFEST_NAME
    if path.exists() and not _is_adopted(path):
        raise PackageError(
            f"{folder}: this is a package of qwenonnx's own, so there is nothing to adopt; it can be used as it is."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PackageError(_not_writable(folder))


def _is_adopted(path: Path) -> bool:
    """Whether a manifest, perhaps of another version, was written by an adoption.

    Raises:
        PackageError: it cannot be read.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PackageError(
            f"{path}: cannot be read ({error}); remove this file if the folder is somebody else's."
        ) from error
    details = raw.get("details") if isinstance(raw, dict) else None
    return isinstance(details, dict) and ADOPTED in details


def _not_writable(folder: Path) -> str:
    return (
        f"{folder}: cannot be written to, and {MANIFEST_NAME} has to go there; copy the folder, or make one of "
        "links to its files."
    )


def _text_files(folder: Path) -> tuple[str, ...]:
    """Names of the files beside the graph that a package is made of.

    Raises:
        PackageError: one that is needed is missing.
    """
    found = tuple(name for name in TEXT_FILES if (folder / name).is_file())
    if missing := [name for name in TOKENIZER_FILES if name not in found]:
        above = folder.absolute().parent
        here = "put the model's tokenizer files beside the graph"
        remedy = f"did you mean {above}?" if (above / missing[0]).is_file() else f"{here}."
        raise PackageError(f"{folder}: there is no {missing[0]}; {remedy}")
    if CONFIG not in found and GENAI_CONFIG not in found:
        raise PackageError(f"{folder}: there is no {CONFIG} (or {GENAI_CONFIG}); put the model's one there.")
    return found


def _check_tokenizer(folder: Path, tokenizer: Tokenizer, configuration: Configuration) -> None:
    rows = configuration.model.vocab_size
    if tokenizer.num_tokens > rows:
        raise PackageError(
            f"{folder}: the tokenizer has {tokenizer.num_tokens:,} tokens and {configuration.file} {rows:,}; they are "
            "of different models, so put this model's tokenizer there."
        )
    listed = configuration.generation.get("eos_token_id")
    ends = listed if isinstance(listed, list) else [listed]
    strange = [end for end in ends if type(end) is int and end >= tokenizer.num_tokens]
    if strange or not end_token_ids(tokenizer, configuration.generation):
        what = f"no token {strange[0]}, which ends an answer" if strange else "no token that ends an answer"
        raise PackageError(
            f"{folder}: the tokenizer has {what}; it is another model's, so put this model's tokenizer there."
        )


def _manifest(
    folder: Path,
    name: str | None,
    graph_name: str,
    graph: GraphFile,
    configuration: Configuration,
    tokenizer: Tokenizer,
) -> Manifest:
    model = name or folder_name(folder.resolve()).rpartition("/")[2].lower()
    return Manifest(
        model=clean_name(model),
        graph=graph.graph,
        recipe=graph.recipe,
        context_length=configuration.model.context_length,
        num_tokens=tokenizer.num_tokens,
        end_token_ids=tuple(sorted(end_token_ids(tokenizer, configuration.generation))),
        inputs=graph.inputs,
        outputs=graph.outputs,
        source={"kind": "adopted", "name": graph_name},
        versions=tool_versions(),
        model_file=graph_name,
        data_files=graph.data_files,
    )


def _with_details(manifest: Manifest, graph: GraphFile, trial: Trial) -> Manifest:
    producer = " ".join(part for part in (graph.producer, graph.producer_version) if part)
    details: dict[str, Any] = {"producer": clean_name(producer or "unknown"), "trial": trial.to_json()}
    return replace(manifest, details={ADOPTED: details})


def _try(package: Package, tokenizer: Tokenizer) -> Trial:
    recipe = package.manifest.recipe
    # Kernels of quantized weights are many times slower on weights that were not rearranged.
    session = SessionConfig.for_one_run() if recipe == "fp32" else SessionConfig.for_this_machine()
    context = min(TRIAL_CONTEXT, package.config.context_length)
    return try_graph(load_runner(package, session, context_length=context), tokenizer, recipe, package.model_path)


def describe_others(others: Sequence[str], most: int = 4) -> str:
    """Names of graphs that were not taken, for a line of text."""
    return ", ".join(others[:most]) + (f" and {len(others) - most} more" if len(others) > most else "")
