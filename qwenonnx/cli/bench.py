"""`qwenonnx bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qwenonnx.cli.bench_engine import EnginePlan, bench_engine
from qwenonnx.cli.console import Stages, say, table, write_results
from qwenonnx.cli.options import JsonFile, PackageFolder, Quiet, Threads
from qwenonnx.cli.packages import beside, open_package
from qwenonnx.errors import PackageError, UsageError

if TYPE_CHECKING:
    from qwenonnx.bench.measure import Measurement
    from qwenonnx.bench.speedup import Speedup
    from qwenonnx.package.package import Package


def bench(
    package: PackageFolder,
    prompt: Annotated[
        list[int] | None,
        typer.Option("--prompt", metavar="N", min=1, help="Prompt length in tokens; repeatable (default: 40, 512)."),
    ] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", metavar="N", min=2, help="Tokens to generate.")] = 128,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Runs to take the median of.")] = 5,
    prefill_chunk: Annotated[
        int, typer.Option("--prefill-chunk", metavar="N", min=1, help="Prompt tokens run at once.")
    ] = 256,
    source: Annotated[
        Path | None,
        typer.Option("--source", metavar="DIR", help="What DIR was quantized from (default: fp32 beside it, if any)."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Also measure, shortly, what DIR was quantized from.")
    ] = True,
    streams: Annotated[
        list[int] | None,
        typer.Option("--streams", metavar="N", min=1, max=256, help="Measure N requests at once; repeatable."),
    ] = None,
    turns: Annotated[
        int | None, typer.Option("--turns", metavar="N", min=1, help="Measure a chat that grows by N turns.")
    ] = None,
    copy: Annotated[
        bool, typer.Option("--copy", help="Measure prompt lookup where an answer repeats its prompt.")
    ] = False,
    soak: Annotated[
        int | None,
        typer.Option("--soak", metavar="N", min=4, help="Run N mixed requests, 30 % of them given up, 16 at a time."),
    ] = None,
    threads: Threads = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Measure speed and memory of a package on this machine.

    Shown are the time to the first token, the rates of prefill and decode, and peak memory. A quantized package is
    compared with its source. With --streams, --turns, --copy or --soak, that is measured instead.
    """
    import time

    if streams or turns or copy or soak:
        plan = EnginePlan(
            streams=tuple(streams or ()),
            turns=turns,
            copy=copy,
            soak=soak,
            prompt_tokens=tuple(prompt or ()),
            new_tokens=new_tokens,
            repeats=repeats,
            prefill_chunk=prefill_chunk,
        )
        bench_engine(open_package(package), plan, threads=threads, json=json, quiet=quiet)
        return

    from qwenonnx.bench.measure import Workload, measure
    from qwenonnx.bench.speedup import Int8Flags, Speedup, short_workload, slowness_warning
    from qwenonnx.engine.config import EngineConfig
    from qwenonnx.engine.load import load_model
    from qwenonnx.runtime.cpu import cpu_info
    from qwenonnx.runtime.load import session_config
    from qwenonnx.runtime.memory import process_memory

    opened = open_package(package)
    workload = Workload(tuple(prompt or (40, 512)), new_tokens, repeats)
    longest = max(workload.prompt_lengths) + new_tokens
    if longest > opened.config.context_length:
        raise UsageError(f"{longest:,} tokens are more than this model's context of {opened.config.context_length:,}.")
    origin = _source_of(opened, source) if compare else None
    session = session_config(threads)
    engine = EngineConfig.for_one(prefill_chunk)
    speedup: Speedup | None = None
    with Stages(quiet=quiet) as stages:
        stages.begin("loading the package")
        start = time.perf_counter()
        model = load_model(opened, session, engine=engine)
        load_seconds = time.perf_counter() - start
        model.engine.start()
        try:
            measured = measure(model.engine, opened.manifest.num_tokens, workload, stages.begin("measuring"))
        finally:
            model.engine.close()
        memory, cpu = process_memory(), cpu_info()  # before the source takes any
        del model
        if origin is not None:
            short = short_workload(workload.prompt_lengths)
            progress = stages.begin(f"comparing with {origin.folder} ({short.new_tokens} tokens, twice)")
            model = load_model(origin, session, engine=engine, check=False)
            model.engine.start()
            try:
                (base,) = measure(model.engine, origin.manifest.num_tokens, short, progress)
            finally:
                model.engine.close()
            (same,) = (entry for entry in measured if entry.prompt_tokens == base.prompt_tokens)
            speedup = Speedup.of(same, base)
    flags = Int8Flags.of(cpu)
    warning = None if speedup is None else slowness_warning(speedup, opened.manifest.recipe, cpu, flags)
    if json is None or str(json) != "-":
        print(f"{opened.manifest.model} {opened.manifest.recipe}, {session.threads} threads on {cpu.model}")
        print(f"instruction sets: {' '.join(cpu.flags) or 'unknown'}")
        print(
            f"loaded in {load_seconds:.2f} s; peak memory {memory.peak / 1e6:,.0f} MB, "
            f"{memory.anonymous / 1e6:,.0f} MB of the present {memory.resident / 1e6:,.0f} MB not backed by files"
        )
        if speedup is not None and origin is not None:
            print(_beside_source(speedup, origin))
        print()
        print(_table(measured))
    write_results(
        json,
        {
            "model": opened.manifest.model,
            "recipe": opened.manifest.recipe,
            "threads": session.threads,
            "cpu": asdict(cpu),
            "cpu_flags": asdict(flags),
            "load_seconds": load_seconds,
            "memory": asdict(memory),
            "runs": [asdict(entry) for entry in measured],
            "source": None if speedup is None or origin is None else _source_figures(speedup, origin),
            "warning": warning,
        },
    )
    if warning is not None and not quiet:
        say(f"warning: {warning}")


def _source_of(package: Package, named: Path | None) -> Package | None:
    """What a package is compared with: what is named, or of a quantized package fp32 beside it, if there is one."""
    from qwenonnx.package.manifest import is_package

    if named is not None:
        source = open_package(named)
        if source.config.vocab_size != package.config.vocab_size:
            raise UsageError(f"{named}: this is no source of {package.folder}, its vocabulary is of another size.")
        return source
    folder = beside(package.folder, "fp32")
    if package.manifest.recipe == "fp32" or not is_package(folder):
        return None
    try:
        source = open_package(folder)
    except PackageError:  # nobody has asked for it
        return None
    return source if source.manifest.model == package.manifest.model else None


def _beside_source(speedup: Speedup, source: Package) -> str:
    return (
        f"beside {source.manifest.recipe}, after {speedup.prompt_tokens} tokens: decode {speedup.decode:.2f} times as "
        f"fast ({speedup.source_decode_rate:,.1f}/s there), prefill {speedup.prefill:.2f} times "
        f"({speedup.source_prefill_rate:,.0f}/s)"
    )


def _source_figures(speedup: Speedup, source: Package) -> dict[str, Any]:
    return {
        "recipe": source.manifest.recipe,
        "prompt_tokens": speedup.prompt_tokens,
        "decode_rate": speedup.source_decode_rate,
        "prefill_rate": speedup.source_prefill_rate,
        "decode_speedup": speedup.decode,
        "prefill_speedup": speedup.prefill,
    }


def _table(measured: Sequence[Measurement]) -> str:
    rows = [
        [
            f"{entry.prompt_tokens} + {entry.new_tokens}",
            f"{entry.ttft * 1e3:,.0f} ms",
            f"{entry.prefill_rate:,.0f}/s",
            f"{entry.decode_rate:,.1f}/s",
            f"{entry.itl_p50 * 1e3:.1f} ms",
            f"{entry.itl_p95 * 1e3:.1f} ms",
        ]
        for entry in measured
    ]
    return table(["tokens in + out", "first token", "prefill", "decode", "gap p50", "gap p95"], rows)
