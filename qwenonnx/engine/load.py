"""From a package to an engine that is ready to answer."""

from __future__ import annotations

from dataclasses import dataclass

from qwenonnx.engine.engine import Engine, EngineConfig
from qwenonnx.engine.integrity import IntegrityCheck
from qwenonnx.package.package import Package
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


def load_model(
    package: Package,
    session: SessionConfig,
    *,
    engine: EngineConfig | None = None,
    context_length: int | None = None,
    check: bool = True,
) -> LoadedModel:
    """Loads a package and runs one token, so that the first request finds everything warm.

    Meanwhile the files are compared with their sums in the manifest, unless `check` is off.

    Raises:
        PackageError: a file was changed or cannot be used.
        UsageError: the context is longer than the model's.
    """
    integrity = IntegrityCheck(package) if check else None
    try:
        model = _load(package, session, engine, context_length)
    except Exception:
        if integrity is not None:
            integrity.wait()  # a changed file explains more than whatever came of it
        raise
    if integrity is not None:
        integrity.wait()
    return model


def _load(
    package: Package, session: SessionConfig, engine: EngineConfig | None, context_length: int | None
) -> LoadedModel:
    tokenizer = Tokenizer.load(package.folder)
    template = ChatTemplate.load(package.folder, tokenizer)
    runner = load_runner(package, session, context_length=context_length)
    end_ids = end_token_ids(tokenizer, package.generation_config)
    runner.prefill(0, [min(end_ids, default=0)], 0)
    return LoadedModel(
        package=package,
        engine=Engine(runner, tokenizer, engine, end_ids=end_ids),
        tokenizer=tokenizer,
        chat_template=template,
        context_length=runner.context_length,
    )
