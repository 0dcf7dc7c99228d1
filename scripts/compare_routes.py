"""Measures packages of one model side by side: first token, speed, memory, and how far each is from a reference.

Usage: python scripts/compare_routes.py PACKAGE PACKAGE… [--reference PACKAGE] [--length N] [--json FILE]

Each package runs in a process of its own, with the same prompts; they take turns run by run, so that a machine whose
speed drifts treats them alike. Medians are reported, as a Markdown table. Fidelity (mean KL divergence, same likeliest
token) is measured on the bundled texts against the reference, by default the first package.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_peers import Worker, measure

from qwenonnx.evaluate.fidelity import measure_candidates
from qwenonnx.evaluate.metrics import Comparison
from qwenonnx.evaluate.texts import bundled_texts
from qwenonnx.package.package import Package
from qwenonnx.runtime.load import load_runner, session_config
from qwenonnx.text.tokenizer import Tokenizer

HEADERS = ("package", "on disk", "first token", "prefill", "decode", "peak memory", "mean KL", "same top token")


def main() -> int:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("packages", metavar="PACKAGE", type=Path, nargs="+")
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--threads", type=int, default=session_config().threads)
    parser.add_argument("--length", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--eval-tokens", type=int, default=320, help="tokens of each text for the fidelity")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    packages = {folder.resolve().name: Package.open(folder) for folder in arguments.packages}
    if len(packages) < len(arguments.packages):
        parser.error("two packages have folders of the same name")
    speeds = measure_speeds(packages, arguments.threads, arguments.length, arguments.new_tokens, arguments.repeats)
    reference = Package.open(arguments.reference or arguments.packages[0])
    fidelity = measure_distances(packages, reference, arguments.threads, arguments.eval_tokens)
    rows = [
        {
            **speeds[name],
            "package": name,
            "bytes": package.bytes,
            "kl_mean": fidelity[name].kl_mean,
            "top1_agreement": fidelity[name].top1_agreement,
        }
        for name, package in packages.items()
    ]
    print(f"{arguments.length} prompt tokens, {arguments.new_tokens} new ones, {arguments.threads} threads\n")
    print(markdown(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


def measure_speeds(
    packages: Mapping[str, Package], threads: int, length: int, new_tokens: int, repeats: int
) -> dict[str, dict[str, Any]]:
    """Medians by package, each in its own process, in turn."""
    workers: list[Worker] = []
    try:
        for name, package in packages.items():
            workers.append(Worker(name, sys.executable, "qwenonnx_worker.py", [str(package.folder), str(threads)]))
        vocabulary = min(100_000, *(package.manifest.num_tokens for package in packages.values()))
        rows = measure(workers, [length], new_tokens, repeats, vocabulary)
    finally:
        for worker in workers:
            worker.close()
    return {row.pop("engine"): row for row in rows}


def measure_distances(
    packages: Mapping[str, Package], reference: Package, threads: int, max_tokens: int
) -> dict[str, Comparison]:
    """All texts together, by package."""
    session = session_config(threads)
    reports = measure_candidates(
        load_runner(reference, session, context_length=max_tokens),
        {name: load_runner(package, session, context_length=max_tokens) for name, package in packages.items()},
        Tokenizer.load(reference.folder),
        bundled_texts(),
        max_tokens=max_tokens,
    )
    return {name: report.overall for name, report in reports.items()}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [f"| {' | '.join(HEADERS)} |", f"|---|{'---:|' * (len(HEADERS) - 1)}"]
    for row in rows:
        cells = (
            f"`{row['package']}`",
            f"{row['bytes'] / 1e6:,.0f} MB",
            f"{row['ttft_ms']:,.0f} ms",
            f"{row['prefill_rate']:,.0f}/s",
            f"{row['decode_rate']:.1f}/s",
            f"{row['peak_rss_mb']:,.0f} MB",
            f"{max(row['kl_mean'], 0):.4f}",
            f"{row['top1_agreement']:.1%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
