"""From a package to an engine that is ready to answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qwenonnx.engine.config import EngineConfig
from qwenonnx.engine.engine import Engine
from qwenonnx.engine.integrity import IntegrityCheck
from qwenonnx.engine.rows import PAGE_TOKENS, pages
from qwenonnx.errors import UsageError
from qwenonnx.package.package import Package
from qwenonnx.runtime.available import available_memory
from qwenonnx.runtime.load import load_runner
from qwenonnx.runtime.session import SessionConfig
from qwenonnx.text.chat_template import ChatTemplate
from qwenonnx.text.tokenizer import Tokenizer, end_token_ids


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A package in memory; whoever loads it starts and closes the engine."""

    package: Package
    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    context_length: int


# Without an order, keys and values may take so much of the memory that is free, and no more than a full context needs.
_DEFAULT_SHARE = 0.5
_LEAST_MEMORY = 64 << 20


def load_model(
    package: Package,
    session: SessionConfig,
    *,
    engine: EngineConfig | None = None,
    context_length: int | None = None,
    kv_memory: int | None = None,
    check: bool = True,
) -> LoadedModel:
    """Loads a package and runs one token, so that the first request finds everything warm.

    Meanwhile the files are compared with their sums in the manifest, unless `check` is off. Keys and values take at
    most `kv_memory` bytes (default: as much as one full context, or half of the memory that is free if that is less).

    Raises:
        PackageError: a file was changed or cannot be used.
        UsageError: the context is longer than the model's, or nothing fits into the memory.
    """
    engine = engine or EngineConfig()
    integrity = IntegrityCheck(package) if check else None
    try:
        model = _load(package, session, engine, context_length, kv_memory)
    except Exception:
        if integrity is not None:
            integrity.wait()  # a changed file explains more than whatever came of it
        raise
    if integrity is not None:
        integrity.wait()
    return model


def _load(
    package: Package,
    session: SessionConfig,
    config: EngineConfig,
    context_length: int | None,
    kv_memory: int | None,
) -> LoadedModel:
    tokenizer = Tokenizer.load(package.folder)
    template = ChatTemplate.load(package.folder, tokenizer)
    runner = load_runner(package, session, context_length=context_length, num_slots=config.num_rows)
    end_ids = end_token_ids(tokenizer, package.generation_config)
    runner.prefill(0, [min(end_ids, default=0)], 0)
    if config.kv_tokens is None:
        config = replace(config, kv_tokens=_kv_tokens(package, runner.context_length, kv_memory))
    engine = Engine(runner, tokenizer, config, end_ids=end_ids)
    return LoadedModel(
        package=package,
        engine=engine,
        tokenizer=tokenizer,
        chat_template=template,
        context_length=engine.context_length,
    )


def _kv_tokens(package: Package, context_length: int, kv_memory: int | None) -> int:
    """Tokens whose keys and values fit into the memory, in whole pages."""
    each = package.config.kv_bytes_per_token
    if kv_memory is None:
        free = available_memory()
        share = each * context_length if free is None else int(free * _DEFAULT_SHARE)
        kv_memory = max(min(share, each * pages(context_length)), _LEAST_MEMORY)
    tokens = kv_memory // each // PAGE_TOKENS * PAGE_TOKENS
    if tokens < PAGE_TOKENS:
        raise UsageError(
            f"{kv_memory:,} bytes are too few for keys and values: {PAGE_TOKENS} tokens take {PAGE_TOKENS * each:,}."
        )
    return tokens
