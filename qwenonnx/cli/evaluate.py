"""`qwenonnx eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qwenonnx.cli.console import Stages, check_results_path, table, write_results
from qwenonnx.cli.options import JsonFile, Quiet, Threads
from qwenonnx.cli.packages import beside, open_package
from qwenonnx.errors import UsageError

if TYPE_CHECKING:
    from qwenonnx.evaluate.fidelity import FidelityReport
    from qwenonnx.package.package import Package


def evaluate(
    package: Annotated[
        Path, typer.Argument(metavar="DIR", help="The package; several are compared in one run.", show_default=False)
    ],
    # Hidden, as the usage line says all of it.
    more: Annotated[list[Path] | None, typer.Argument(metavar="DIR", hidden=True)] = None,
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
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Also draw KL by text and package here (.png or .svg)."),
    ] = None,
    json: JsonFile = None,
    threads: Threads = None,
    quiet: Quiet = False,
) -> None:
    """Measure how faithful packages are to a reference.

    The measures are KL divergence, top-1 agreement and perplexity.
    """
    from qwenonnx.evaluate.fidelity import measure_candidates
    from qwenonnx.evaluate.plot import check_plot_path, plot_reports
    from qwenonnx.evaluate.texts import bundled_texts, read_texts
    from qwenonnx.runtime.load import load_runner, session_config
    from qwenonnx.text.tokenizer import Tokenizer

    if plot is not None:
        check_plot_path(plot)
        check_results_path(plot)
    for path in text or ():
        if not path.exists():
            raise UsageError(f"{path}: there is no such file; name a text to evaluate on.")
    candidates = _named([package, *(more or ())])
    base = open_package(reference or _fp32_beside(package))
    for candidate in candidates.values():
        _check_same_vocabulary(candidate, base)
    texts = read_texts(text) if text else bundled_texts()
    with Stages(quiet=quiet) as stages:
        stages.begin("loading the packages")
        tokenizer = Tokenizer.load(base.folder)
        session = session_config(threads)
        reports = measure_candidates(
            load_runner(base, session, context_length=max_tokens),
            {name: load_runner(opened, session, context_length=max_tokens) for name, opened in candidates.items()},
            tokenizer,
            texts,
            max_tokens=max_tokens,
            progress=stages.begin("evaluating"),
        )
        if plot is not None:
            stages.begin("drawing")
            plot_reports(reports, f"{base.manifest.model} {base.manifest.recipe}", plot)
    (first, *others) = reports.values()
    if json is None or str(json) != "-":
        print(_comparison(reports) if others else _details(first))
    write_results(
        json,
        {"packages": {name: report.to_json() for name, report in reports.items()}} if others else first.to_json(),
    )


def _named(folders: Sequence[Path]) -> dict[str, Package]:
    """Opened packages by the names of their folders, or by their paths where these are not unique."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UsageError("the same package is named twice; name each one once.")
    return {name: open_package(folder) for name, folder in zip(names, folders, strict=True)}


def _fp32_beside(package: Path) -> Path:
    """The default reference.

    Raises:
        UsageError: there is none.
    """
    folder = beside(package, "fp32")
    if not folder.exists():
        raise UsageError(
            f"{folder}: there is no such folder to compare {package} with; name a package of the same model with "
            "--reference."
        )
    return folder


def _check_same_vocabulary(candidate: Package, base: Package) -> None:
    if base.config.vocab_size != candidate.config.vocab_size:
        raise UsageError(
            f"{candidate.folder} and {base.folder} are of different models ({candidate.config.vocab_size:,} and "
            f"{base.config.vocab_size:,} rows of vocabulary); name the package's own fp32 one with --reference."
        )


def _details(report: FidelityReport) -> str:
    """All figures of one package, by text."""
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
    headers = ["text", "tokens", "mean KL", "top-1", "perplexity", "reference"]
    return f"{table(headers, rows)}\n\n{_worst(report)}"


def _comparison(reports: Mapping[str, FidelityReport]) -> str:
    """KL and agreement of several packages by text, then a line about each."""
    headers = ["text", "tokens", *(cell for name in reports for cell in (f"{name}: KL", "top-1"))]
    columns = [[*((entry.name, entry.comparison) for entry in report.texts)] for report in reports.values()]
    rows = [
        [
            entries[0][0],
            f"{entries[0][1].positions:,}",
            *(cell for _, figures in entries for cell in (f"{figures.kl_mean:.5f}", f"{figures.top1_agreement:.2%}")),
        ]
        for entries in zip(*columns, strict=True)
    ]
    summary = [
        [
            name,
            f"{report.overall.positions:,}",
            f"{report.overall.kl_mean:.5f}",
            f"{report.overall.top1_agreement:.2%}",
            f"{report.overall.perplexity:.3f}",
            f"{report.overall.reference_perplexity:.3f}",
        ]
        for name, report in reports.items()
    ]
    overall = table(["overall", "tokens", "mean KL", "top-1", "perplexity", "reference"], summary)
    worst = "\n".join(f"{name}: {_worst(report)}" for name, report in reports.items())
    return f"{table(headers, rows)}\n\n{overall}\n\n{worst}"


def _worst(report: FidelityReport) -> str:
    text, place = report.worst, report.worst_position
    return (
        f"worst text {text.name} (mean KL {text.comparison.kl_mean:.5f}), "
        f"worst position {place.comparison.worst_position} of {place.name} (KL {place.comparison.worst_kl:.3f})"
    )
