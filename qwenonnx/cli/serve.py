"""`qwenonnx serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from qwenonnx.cli.console import describe_gate
from qwenonnx.cli.options import PackageFolder, Threads
from qwenonnx.cli.packages import open_package

if TYPE_CHECKING:
    from qwenonnx.engine.load import LoadedModel
    from qwenonnx.package.manifest import Manifest
    from qwenonnx.runtime.session import SessionConfig
    from qwenonnx.server.served import Served


def serve(
    package: PackageFolder,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 for all interfaces.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = 8000,
    model_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the model in requests and answers (default: the package's)."),
    ] = None,
    context_length: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, help="Tokens of prompt and answer together (default: the model's)."),
    ] = None,
    threads: Threads = None,
    prefill_chunk: Annotated[int, typer.Option(metavar="N", min=1, help="Prompt tokens run at once.")] = 256,
    max_queue: Annotated[int, typer.Option(metavar="N", min=1, help="Requests that may wait; more get a 429.")] = 64,
    max_running: Annotated[
        int, typer.Option(metavar="N", min=1, max=256, help="Requests that are answered at once.")
    ] = 16,
    max_step_delay: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.01, max=60, help="How long a piece of a prompt may hold up answers."),
    ] = 0.1,
    kv_memory: Annotated[
        int | None,
        typer.Option(
            metavar="MB",
            min=1,
            help="Memory for keys and values in MB (default: one full context, or half of the rest).",
        ),
    ] = None,
    speculate: Annotated[
        bool,
        typer.Option("--speculate/--no-speculate", help="Guess repeated text (prompt lookup) when one request runs."),
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(metavar="X", min=0, max=2, help="Default temperature of requests.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(metavar="X", min=0, max=1, help="Default top_p of requests.")] = None,
    top_k: Annotated[
        int | None, typer.Option(metavar="N", min=-1, help="Default top_k of requests; 0 and -1 switch it off.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(metavar="X", min=0.01, max=10, help="Default repetition penalty of requests.")
    ] = None,
    max_tokens_default: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Tokens of an answer where the request sets no limit."),
    ] = None,
    last_turns: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Keep only the last N turns of long chats (default: refuse these)."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", envvar="QWENONNX_API_KEY", help="Accepted bearer token; repeatable. Default: none needed."
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="File of more such tokens, one a line; # starts a comment."),
    ] = None,
    rate_limit: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Requests a minute of each key, or else of each client address."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Web origin whose pages may call the server; repeatable."),
    ] = None,
    max_body: Annotated[
        int, typer.Option(metavar="BYTES", min=1, max=1 << 30, help="Largest request body in bytes.")
    ] = 8 << 20,
    max_messages: Annotated[
        int, typer.Option(metavar="N", min=1, max=1 << 20, help="Most messages in one request.")
    ] = 2048,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Compare all files with their sums while loading."),
    ] = True,
    grace: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, max=3600, help="Seconds that running requests get after SIGTERM."),
    ] = 10.0,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(metavar="LEVEL", help="How much to log: debug, info, warning or error."),
    ] = "info",
) -> None:
    """Serve a package over HTTP with the OpenAI API."""
    from qwenonnx.engine.config import EngineConfig
    from qwenonnx.engine.load import load_model
    from qwenonnx.runtime.load import session_config
    from qwenonnx.server.access import read_keys
    from qwenonnx.server.config import ServeConfig
    from qwenonnx.server.run import serve as run

    config = ServeConfig(
        host=host,
        port=port,
        log_level=log_level,
        grace=grace,
        max_body=max_body,
        max_messages=max_messages,
        requests_per_minute=rate_limit,
        last_turns=last_turns,
        max_tokens_default=max_tokens_default,
        api_keys=(*(api_key or ()), *read_keys(api_key_file)),
        cors_origins=tuple(cors_origin or ()),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
    )
    # What can be wrong with the folder is said before the port is taken.
    opened = open_package(package)
    session = session_config(threads)
    engine = EngineConfig(
        prefill_chunk=prefill_chunk,
        max_queue=max_queue,
        max_running=max_running,
        max_step_delay=max_step_delay,
        speculate=speculate,
    )
    kv_bytes = None if kv_memory is None else kv_memory * 1_000_000

    def load() -> Served:
        model = load_model(
            opened, session, engine=engine, context_length=context_length, kv_memory=kv_bytes, check=check
        )
        return _served(model, model_name, session, checked=check)

    raise typer.Exit(run(load, config))


def _served(model: LoadedModel, name: str | None, session: SessionConfig, *, checked: bool) -> Served:
    import time

    from qwenonnx.server.served import GenerationDefaults, Served

    manifest = model.package.manifest
    known = (manifest.model, str(manifest.source.get("name", "")))
    chosen = name or manifest.model
    gate = manifest.details.get("gate")
    fidelity = f"Recipe {manifest.recipe}: {_fidelity(manifest)}"
    suspect = gate is not None and not gate.get("passed")
    return Served(
        engine=model.engine,
        tokenizer=model.tokenizer,
        chat_template=model.chat_template,
        model_name=chosen,
        created=int(time.time()),
        context_length=model.context_length,
        defaults=GenerationDefaults.from_generation_config(model.package.generation_config),
        aliases=tuple(alias for alias in known if alias and alias != chosen),
        info={
            "recipe": manifest.recipe,
            "threads": session.threads,
            "context_length": model.context_length,
            "max_running": model.engine.max_running,
            "integrity_checked": checked,
            "gate": gate,
        },
        summary=() if suspect else (fidelity,),
        warnings=(fidelity,) if suspect else (),
    )


def _fidelity(manifest: Manifest) -> str:
    """What its making has said about how near it is to what it was made from."""
    gate = manifest.details.get("gate")
    if gate is None:
        return "not quantized" if manifest.recipe == "fp32" else "its fidelity was not measured"
    return describe_gate(gate)
