"""From a package to an engine that is ready to answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qwenonnx.engine.config import EngineConfig
from qwenonnx.engine.engine import Engine
from qwenonnx.engine.integrity import IntegrityCheck
from qwenonnx.engine.prefix_files import PrefixFiles, package_sum
from qwenonnx.engine.rows import PAGE_TOKENS, pages
from qwenonnx.engine.runner import ModelRunner
from qwenonnx.engine.step_costs import StepCosts
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
    config: EngineConfig
    runner: ModelRunner
    end_ids: frozenset[int]

    def another_engine(self, *, speculate: bool) -> Engine:
        """An engine over the same model with an empty cache, not started; only one of them may run at a time."""
        config = replace(self.config, speculate=speculate)
        return Engine(self.runner, self.tokenizer, config, end_ids=self.end_ids)


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
    system_prompts: Sequence[str] = (),
    prefix_folder: Path | None = None,
) -> LoadedModel:
    """Loads a package and runs one token, so that the first request finds everything warm.

    Meanwhile the files are compared with their sums in the manifest, unless `check` is off. Keys and values take at
    most `kv_memory` bytes (default: as much as one full context, or half of the memory that is free if that is less).
    `system_prompts` are read now and stay in the cache. What the cache holds is loaded from `prefix_folder` and kept
    there, in at most as many bytes as it takes in memory.

    Raises:
        PackageError: a file was changed or cannot be used.
        UsageError: the context is longer than the model's, or nothing fits into the memory.
        InvalidRequestError: there are system prompts but no chat template.
    """
    engine = engine or EngineConfig()
    integrity = IntegrityCheck(package) if check else None
    try:
        model = _load(package, session, engine, context_length, kv_memory, system_prompts, prefix_folder)
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
    system_prompts: Sequence[str],
    prefix_folder: Path | None,
) -> LoadedModel:
    tokenizer = Tokenizer.load(package.folder)
    template = ChatTemplate.load(package.folder, tokenizer)
    prompts = [
        tuple(template.encode([{"role": "system", "content": text}], add_generation_prompt=False))
        for text in system_prompts
    ]
    slots = config.num_rows + len(prompts)
    runner = load_runner(package, session, context_length=context_length, num_slots=slots)
    end_ids = end_token_ids(tokenizer, package.generation_config)
    runner.prefill(0, [min(end_ids, default=0)], 0)
    if config.speculate:
        config = replace(config, costs=StepCosts.measured(runner))
    if config.kv_tokens is None:
        config = replace(config, kv_tokens=_kv_tokens(package, runner.context_length, kv_memory))
    files = None
    if prefix_folder is not None:
        limit = package.config.kv_bytes_per_token * (config.kv_tokens or 0)
        files = PrefixFiles(prefix_folder, package_sum(package), limit)
    engine = Engine(runner, tokenizer, config, end_ids=end_ids, prefix_files=files)
    engine.preload(prompts)
    return LoadedModel(
        package=package,
        engine=engine,
        tokenizer=tokenizer,
        chat_template=template,
        context_length=engine.context_length,
        config=config,
        runner=runner,
        end_ids=end_ids,
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
