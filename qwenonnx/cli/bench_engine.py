"""What `qwenonnx bench` measures of the engine: many requests, growing chats, copying, and endurance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwenonnx.cli.console import Stages, table, write_results
from qwenonnx.errors import UsageError

if TYPE_CHECKING:
    from qwenonnx.bench.copying import CopyMeasurement
    from qwenonnx.bench.soak import SoakReport
    from qwenonnx.bench.streams import Interference, StreamsMeasurement
    from qwenonnx.bench.turns import TurnMeasurement
    from qwenonnx.engine.load import LoadedModel
    from qwenonnx.package.package import Package

_STREAM_PROMPT, _TURN_PROMPT = 128, 200
# A prompt that arrives while answers are being written, and these, if the context has room for them.
_LONG_PROMPT, _LONG_ANSWER = 4000, 128
_SOAK_STREAMS = 16


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What was asked for; `prompt_tokens` empty takes the usual lengths."""

    streams: tuple[int, ...]
    turns: int | None
    copy: bool
    soak: int | None
    prompt_tokens: tuple[int, ...]
    new_tokens: int
    repeats: int
    prefill_chunk: int

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        stream = self._prompt(_STREAM_PROMPT) + self.new_tokens if self.streams else 0
        return max(stream, (self.turns or 0) * (self.turn_tokens + self.new_tokens))

    @property
    def stream_tokens(self) -> int:
        """Tokens of each stream's prompt."""
        return self._prompt(_STREAM_PROMPT)

    @property
    def turn_tokens(self) -> int:
        """New tokens of each turn's prompt."""
        return self._prompt(_TURN_PROMPT)

    def _prompt(self, usual: int) -> int:
        return self.prompt_tokens[0] if self.prompt_tokens else usual


def bench_engine(package: Package, plan: EnginePlan, *, threads: int | None, json: Path | None, quiet: bool) -> None:
    """Loads the package once, measures what was asked for, and prints it.

    Raises:
        UsageError: the requests do not fit the context.
        QwenonnxError: one of them failed.
    """
    from qwenonnx.engine.config import EngineConfig
    from qwenonnx.engine.load import load_model
    from qwenonnx.runtime.load import session_config

    if plan.longest > package.config.context_length:
        raise UsageError(
            f"{plan.longest:,} tokens are more than this model's context of {package.config.context_length:,}."
        )
    running = max((*plan.streams, _SOAK_STREAMS))
    config = EngineConfig(prefill_chunk=plan.prefill_chunk, max_running=running, max_queue=running, speculate=plan.copy)
    session = session_config(threads)
    texts: list[str] = []
    results: dict[str, Any] = {
        "model": package.manifest.model,
        "recipe": package.manifest.recipe,
        "threads": session.threads,
    }
    with Stages(quiet=quiet) as stages:
        stages.begin("loading the package")
        model = load_model(package, session, engine=config)
        if plan.copy:
            _copying(model, plan, stages, texts, results)
        if plan.streams or plan.turns or plan.soak:
            _running(model, plan, stages, texts, results)
    if json is None or str(json) != "-":
        print("\n\n".join(texts))
    write_results(json, results)


def _copying(model: LoadedModel, plan: EnginePlan, stages: Stages, texts: list[str], results: dict[str, Any]) -> None:
    from qwenonnx.bench.copying import measure_copying

    measured = measure_copying(
        lambda ahead: model.another_engine(speculate=ahead),
        model.chat_template,
        new_tokens=plan.new_tokens,
        repeats=plan.repeats,
        progress=stages.begin("measuring prompt lookup"),
    )
    texts.append(_copy_table(measured))
    results["copy"] = [asdict(entry) for entry in measured]


def _running(model: LoadedModel, plan: EnginePlan, stages: Stages, texts: list[str], results: dict[str, Any]) -> None:
    from qwenonnx.bench.soak import soak
    from qwenonnx.bench.streams import measure_interference, measure_streams
    from qwenonnx.bench.turns import measure_turns

    vocabulary = model.package.manifest.num_tokens
    engine = model.another_engine(speculate=False)
    engine.start()
    try:
        if plan.streams:
            measured = measure_streams(
                engine,
                vocabulary,
                plan.streams,
                prompt_tokens=plan.stream_tokens,
                new_tokens=plan.new_tokens,
                repeats=plan.repeats,
                progress=stages.begin("measuring streams"),
            )
            stages.begin("measuring long prompts beside them")
            long = min(_LONG_PROMPT, model.context_length // 2)
            tokens = min(max(_LONG_ANSWER, plan.new_tokens), model.context_length // 2)
            beside = measure_interference(
                engine, vocabulary, streams=max(plan.streams), prompt_tokens=long, new_tokens=tokens
            )
            texts += [_streams_table(measured), _interference_line(beside)]
            results |= {"streams": [asdict(entry) for entry in measured], "long_prompts": asdict(beside)}
        if plan.turns:
            turns = measure_turns(
                engine,
                vocabulary,
                turns=plan.turns,
                turn_tokens=plan.turn_tokens,
                new_tokens=plan.new_tokens,
                repeats=plan.repeats,
                progress=stages.begin("measuring turns"),
            )
            texts.append(_turns_table(turns))
            results["turns"] = [asdict(entry) for entry in turns]
        if plan.soak:
            progress = stages.begin("soaking")
            report = soak(engine, vocabulary, requests=plan.soak, streams=_SOAK_STREAMS, progress=progress)
            texts.append(_soak_text(report))
            results["soak"] = asdict(report)
    finally:
        engine.close()


def _streams_table(measured: Sequence[StreamsMeasurement]) -> str:
    rows = [
        [
            f"{entry.streams} x ({entry.prompt_tokens} + {entry.new_tokens})",
            "-" if entry.decode_rate is None else f"{entry.decode_rate:,.1f}/s",
            f"{entry.whole_rate:,.1f}/s",
            f"{entry.ttft_p50 * 1e3:,.0f} ms",
            f"{entry.ttft_p95 * 1e3:,.0f} ms",
            f"{entry.itl_p50 * 1e3:.1f} ms",
            f"{entry.itl_p95 * 1e3:.1f} ms",
        ]
        for entry in measured
    ]
    headers = ["streams x (in + out)", "decode", "whole", "first p50", "first p95", "gap p50", "gap p95"]
    return table(headers, rows)


def _interference_line(beside: Interference) -> str:
    first = "none was through before the end" if beside.long_ttft is None else f"first token {beside.long_ttft:.1f} s"
    return (
        f"{beside.streams} streams while prompts of {beside.prompt_tokens:,} tokens arrive: gap p95 "
        f"{beside.itl_p95_beside * 1e3:.1f} ms instead of {beside.itl_p95_alone * 1e3:.1f} ms "
        f"({beside.itl_p95_beside / beside.itl_p95_alone:.2f} times), at most {beside.itl_max_beside * 1e3:.1f} ms; "
        f"{first}"
    )


def _turns_table(measured: Sequence[TurnMeasurement]) -> str:
    first = measured[0].ttft
    rows = [
        [
            str(entry.turn),
            f"{entry.prompt_tokens:,}",
            f"{entry.cached_tokens:,}",
            f"{entry.ttft * 1e3:,.0f} ms",
            f"{entry.ttft / first:.2f}",
        ]
        for entry in measured
    ]
    return table(["turn", "prompt", "cached", "first token", "to turn 1"], rows)


def _copy_table(measured: Sequence[CopyMeasurement]) -> str:
    rows = [
        [
            entry.task,
            str(entry.tokens),
            f"{entry.rate_without:,.1f}/s",
            f"{entry.rate_with:,.1f}/s",
            f"{entry.ratio:.2f}",
            "yes" if entry.same else "no",
        ]
        for entry in measured
    ]
    return table(["prompt lookup", "tokens", "off", "on", "ratio", "same answer"], rows)


def _soak_text(report: SoakReport) -> str:
    growth = report.resident_in_the_end / report.resident_after_quarter - 1
    return (
        f"{report.requests:,} requests, {report.aborted:,} given up, {report.failed:,} failed; of {report.compared:,} "
        f"answers written again alone {report.differing:,} differ; resident {report.resident_after_quarter / 1e6:,.0f} "
        f"MB after a quarter, {report.resident_in_the_end / 1e6:,.0f} MB in the end ({growth:+.1%}); left over: "
        f"{report.left_over} requests, {report.threads_left_over} threads"
    )
