"""`qwenonnx inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from qwenonnx.cli.console import Stages, describe_gate, table, write_results
from qwenonnx.cli.options import JsonFile, PackageFolder, Quiet
from qwenonnx.cli.packages import open_package

# By the kind of the graph; others can decode several rows in one step.
_SCHEDULES = {"portable": "run in turn; each has a cache of its own, which grows and is copied at every step"}


def inspect(
    package: PackageFolder,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Read all files and compare their sums with the manifest."),
    ] = True,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Show what is in a package, and check its files.

    Shown are recipe, origin, operators, sizes and integrity.
    """
    import onnx

    opened = open_package(package)
    if check:
        with Stages(quiet=quiet) as stages:
            opened.check_sums(stages.begin("checking the files"))
    manifest, config = opened.manifest, opened.config
    model = onnx.load(str(opened.model_path), load_external_data=False)
    operators = Counter(f"{node.domain}:{node.op_type}".removeprefix(":") for node in model.graph.node)
    heads = f"{config.num_heads} heads ({config.num_kv_heads} for keys and values)"
    ends = ", ".join(map(str, manifest.end_token_ids))
    facts = [
        ["model", manifest.model],
        ["recipe", f"{manifest.recipe} ({manifest.graph} graph)"],
        ["requests", _SCHEDULES.get(manifest.graph, "run together")],
        ["source", f"{manifest.source.get('kind')} {manifest.source.get('name')}"],
        *([["source sha256", str(digest)]] if (digest := manifest.source.get("sha256")) else []),
        *([["exported by", producer]] if (producer := _producer(manifest.details)) else []),
        ["layers", f"{config.num_layers} with {heads}, hidden size {config.hidden_size}"],
        ["vocabulary", f"{manifest.num_tokens:,} tokens in {config.vocab_size:,} rows, ends at {ends}"],
        ["context", f"{manifest.context_length:,} tokens, {config.kv_bytes_per_token:,} bytes of KV cache each"],
        ["written by", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())],
        *([["fidelity", describe_gate(gate)]] if (gate := manifest.details.get("gate")) else []),
        ["integrity", "all files match their sums" if check else "not checked"],
    ]
    if json is None or str(json) != "-":
        for name, value in facts:
            print(f"{name:14} {value}")
        print()
        print(table(["file", "bytes"], [[name, f"{entry.bytes:,}"] for name, entry in manifest.files.items()]))
        print()
        print(table(["operator", "nodes"], [[name, str(count)] for name, count in operators.most_common()]))
    write_results(json, {**asdict(manifest), "operators": dict(operators), "integrity_checked": check})


def _producer(details: Mapping[str, Any]) -> str | None:
    """The program that wrote the graph of an adopted package."""
    adopted = details.get("adopted")
    return str(adopted.get("producer")) if isinstance(adopted, Mapping) else None
