"""`qwenonnx bench`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from qwenonnx.cli.console import Stages, table, write_results
from qwenonnx.cli.options import JsonFile, PackageFolder, Quiet, Threads
from qwenonnx.cli.packages import open_package


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
    threads: Threads = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Measure speed and memory of a package on this machine.

    Shown are the time to the first token, the rates of prefill and decode, and peak memory.
    """
    import time

    from qwenonnx.bench.measure import Workload, measure
    from qwenonnx.engine.engine import EngineConfig
    from qwenonnx.engine.load import load_model
    from qwenonnx.errors import UsageError
    from qwenonnx.runtime.cpu import cpu_info
    from qwenonnx.runtime.load import session_config
    from qwenonnx.runtime.memory import process_memory

    opened = open_package(package)
    workload = Workload(tuple(prompt or (40, 512)), new_tokens, repeats)
    longest = max(workload.prompt_lengths) + new_tokens
    if longest > opened.config.context_length:
        raise UsageError(f"{longest:,} tokens are more than this model's context of {opened.config.context_length:,}.")
    session = session_config(threads)
    with Stages(quiet=quiet) as stages:
        stages.begin("loading the package")
        start = time.perf_counter()
        model = load_model(opened, session, engine=EngineConfig(prefill_chunk=prefill_chunk))
        load_seconds = time.perf_counter() - start
        model.engine.start()
        try:
            measured = measure(model.engine, opened.manifest.num_tokens, workload, stages.begin("measuring"))
        finally:
            model.engine.close()
    memory, cpu = process_memory(), cpu_info()
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
    if json is None or str(json) != "-":
        print(f"{opened.manifest.model} {opened.manifest.recipe}, {session.threads} threads on {cpu.model}")
        print(f"instruction sets: {' '.join(cpu.flags) or 'unknown'}")
        print(
            f"loaded in {load_seconds:.2f} s; peak memory {memory.peak / 1e6:,.0f} MB, "
            f"{memory.anonymous / 1e6:,.0f} MB of the present {memory.resident / 1e6:,.0f} MB not backed by files"
        )
        print()
        print(table(["tokens in + out", "first token", "prefill", "decode", "gap p50", "gap p95"], rows))
    write_results(
        json,
        {
            "model": opened.manifest.model,
            "recipe": opened.manifest.recipe,
            "threads": session.threads,
            "cpu": asdict(cpu),
            "load_seconds": load_seconds,
            "memory": asdict(memory),
            "runs": [asdict(entry) for entry in measured],
        },
    )
