"""`qwenonnx eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwenonnx.cli.console import Stages, table, write_results
from qwenonnx.cli.options import JsonFile, PackageFolder, Quiet, Threads
from qwenonnx.cli.packages import beside, open_package


def evaluate(
    package: PackageFolder,
    reference: Annotated[
        Path | None,
        typer.Option("--reference", metavar="DIR", help="The package to compare with (default: fp32 beside DIR)."),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", metavar="FILE", help="A text of your own, instead of the bundled ones; repeatable."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=2, help="Tokens of each text to use.")
    ] = 512,
    json: JsonFile = None,
    threads: Threads = None,
    quiet: Quiet = False,
) -> None:
    """Measure how faithful a package is to its reference.

    The measures are KL divergence, top-1 agreement and perplexity.
    """
    from qwenonnx.errors import UsageError
    from qwenonnx.evaluate.fidelity import measure_fidelity
    from qwenonnx.evaluate.texts import bundled_texts, read_texts
    from qwenonnx.runtime.load import load_runner, session_config
    from qwenonnx.text.tokenizer import Tokenizer

    for path in text or ():
        if not path.exists():
            raise UsageError(f"{path}: there is no such file; name a text to evaluate on.")
    candidate = open_package(package)
    base = open_package(reference or beside(package, "fp32"))
    if base.config.vocab_size != candidate.config.vocab_size:
        raise UsageError(
            f"{package} and {base.folder} are of different models ({candidate.config.vocab_size:,} and "
            f"{base.config.vocab_size:,} rows of vocabulary); name the package's own fp32 one with --reference."
        )
    texts = read_texts(text) if text else bundled_texts()
    with Stages(quiet=quiet) as stages:
        stages.begin("loading the packages")
        tokenizer = Tokenizer.load(base.folder)
        session = session_config(threads)
        report = measure_fidelity(
            load_runner(base, session, context_length=max_tokens),
            load_runner(candidate, session, context_length=max_tokens),
            tokenizer,
            texts,
            max_tokens=max_tokens,
            progress=stages.begin("evaluating"),
        )
    results = [*((entry.name, entry.comparison) for entry in report.texts), ("overall", report.overall)]
    rows = [
        [
            name,
            f"{figures.positions:,}",
            f"{figures.kl_mean:.5f}",
            f"{figures.top1_agreement:.2%}",
            f"{figures.perplexity:.3f}",
            f"{figures.reference_perplexity:.3f}",
        ]
        for name, figures in results
    ]
    if json is None or str(json) != "-":
        print(table(["text", "tokens", "mean KL", "top-1", "perplexity", "reference"], rows))
    write_results(json, report.to_json())
