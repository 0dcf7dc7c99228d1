"""Measures prompt lookup: what a step with a draft costs, and answers with and without drafts, in turn.

Usage: python scripts/bench_speculation.py PACKAGE [--new-tokens 200] [--repeats 3] [--temperature 0] [--json FILE]

The copying tasks ask for a 60-line file of the standard library again, with one name changed or as it is, the others
for free text. Rates are of tokens after the first one. Each pair of runs follows at once, so that their ratio says
something even on a busy machine; medians are reported, and where two answers differ first.
"""

from __future__ import annotations

import argparse
import inspect
import json
import queue
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from qwenonnx.engine.config import EngineConfig
from qwenonnx.engine.engine import Engine
from qwenonnx.engine.request import Delta, Failed, Finished, GenerationRequest
from qwenonnx.engine.sampling import SamplingParams
from qwenonnx.engine.step_costs import StepCosts
from qwenonnx.package.package import Package
from qwenonnx.runtime.load import PackageRunner, load_runner, session_config
from qwenonnx.text.chat_template import ChatTemplate
from qwenonnx.text.tokenizer import Tokenizer, end_token_ids

DRAFTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 23, 31)
CONTEXT = 2048

FILE = "\n".join(inspect.getsource(queue.Queue).splitlines()[:60])
TASKS = {
    "rename": f"Rename the class `Queue` to `Mailbox` in this file. Answer with all of it.\n```python\n{FILE}\n```",
    "copy": f"Return this file as it is, complete and alone.\n```python\n{FILE}\n```",
    "explain": "Explain how TCP notices congestion, and what it does then.",
    "story": "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "code": "Write a Python class for a priority queue whose items can change their priority, with docstrings.",
}


@dataclass(frozen=True, slots=True)
class Run:
    """An answer, its rate in tokens per second after the first, and the steps that it took."""

    token_ids: tuple[int, ...]
    rate: float
    steps: int


class CountingRunner:
    """Passes everything on to a runner and counts steps."""

    def __init__(self, runner: PackageRunner) -> None:
        self._runner = runner
        self.steps = 0

    def __getattr__(self, name: str) -> object:
        if name in ("decode", "score"):
            self.steps += 1
        return getattr(self._runner, name)


def step_seconds(runner: PackageRunner, past: int, repeats: int) -> dict[int, float]:
    """Median seconds of a step with drafts of several lengths behind `past` tokens."""
    generator = random.Random(past)
    for start in range(0, past, 256):
        size = min(256, past - start)
        runner.prefill(0, [generator.randrange(100_000) for _ in range(size)], start)
    seconds: dict[int, list[float]] = {count: [] for count in DRAFTS}
    for repeat in range(repeats + 1):
        for count in DRAFTS:
            ids = [generator.randrange(100_000) for _ in range(1 + count)]
            began = time.perf_counter()
            if count:
                runner.score(ids, past, 0)
            else:
                runner.decode(ids, [past])
            if repeat:  # the first round warms up
                seconds[count].append(time.perf_counter() - began)
    return {count: statistics.median(times) for count, times in seconds.items()}


def run(
    runner: PackageRunner, tokenizer: Tokenizer, request: GenerationRequest, config: EngineConfig, end: frozenset[int]
) -> Run:
    """One answer, on an engine of its own, so that nothing is in the cache."""
    counting = CountingRunner(runner)
    engine = Engine(counting, tokenizer, config, end_ids=end)  # type: ignore[arg-type]
    engine.start()
    try:
        events = list(engine.generate(request))
    finally:
        engine.close()
    last = events[-1]
    if not isinstance(last, Finished):
        raise last.error if isinstance(last, Failed) else RuntimeError("the answer has no end")
    ids = tuple(token_id for event in events if isinstance(event, Delta) for token_id in event.token_ids)
    return Run(ids, (len(ids) - 1) / last.timings.decode, counting.steps)


def first_difference(one: Run, other: Run) -> int | None:
    """Where two answers part; None where they do not."""
    if one.token_ids == other.token_ids:
        return None
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    shorter = min(len(one.token_ids), len(other.token_ids))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)


def logit_gap(runner: PackageRunner, prompt: tuple[int, ...], one: Run, other: Run, at: int) -> float:
    """How far apart the logits of the two next tokens are where two answers part."""
    if at >= min(len(one.token_ids), len(other.token_ids)):
        return float("nan")  # one of them ended
    logits = runner.prefill(0, [*prompt, *one.token_ids[:at]], 0)
    return abs(float(logits[one.token_ids[at]]) - float(logits[other.token_ids[at]]))


def main() -> int:
    """Runs the measurement and prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("package", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=200, help="Of free text; copies have room for 800.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--past", type=int, nargs="*", default=[500])
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    package = Package.open(arguments.package)
    runner = load_runner(package, session_config(arguments.threads), num_slots=1, context_length=CONTEXT)
    tokenizer = Tokenizer.load(package.folder)
    template = ChatTemplate.load(package.folder, tokenizer)
    end = end_token_ids(tokenizer, package.generation_config)
    costs = StepCosts.measured(runner)
    report: dict[str, object] = {"costs": str(costs)}
    print(costs)
    for past in arguments.past:
        seconds = step_seconds(runner, past, 3 * arguments.repeats)
        print(f"behind {past} tokens, a step takes {1e3 * seconds[0]:.1f} ms; with a draft, that times")
        print("  " + "  ".join(f"{count}: {seconds[count] / seconds[0]:.2f}" for count in DRAFTS if count))
        report[f"past {past}"] = seconds
    print(f"{'task':8} {'tokens':>6} {'off/s':>7} {'on/s':>7} {'ratio':>6} {'steps':>6} same")
    for name in arguments.tasks:
        prompt = tuple(template.encode([{"role": "user", "content": TASKS[name]}]))
        new_tokens = 800 if name in ("rename", "copy") else arguments.new_tokens
        sampling = SamplingParams(temperature=arguments.temperature, seed=1)
        request = GenerationRequest(prompt, sampling, max_tokens=new_tokens)
        pairs: list[tuple[Run, Run]] = []
        for repeat in range(arguments.repeats):
            runs = {
                speculate: run(
                    runner,
                    tokenizer,
                    request,
                    EngineConfig(max_running=1, cached_rows=0, speculate=speculate, costs=costs),
                    end,
                )
                for speculate in ((False, True) if repeat % 2 == 0 else (True, False))
            }
            pairs.append((runs[False], runs[True]))
        ratio = statistics.median(on.rate / off.rate for off, on in pairs)
        off, on = pairs[-1]
        difference = first_difference(off, on)
        gap = 0.0 if difference is None else logit_gap(runner, prompt, off, on, difference)
        rates = [statistics.median(pair[i].rate for pair in pairs) for i in range(2)]
        where = "yes" if difference is None else f"up to token {difference} (two logits {gap:.3f} apart)"
        print(
            f"{name:8} {len(on.token_ids):6} {rates[0]:7.1f} {rates[1]:7.1f} {ratio:6.2f} {on.steps:6} {where}",
            flush=True,
        )
        report[name] = {"off": rates[0], "on": rates[1], "ratio": ratio, "steps": on.steps, "difference": difference}
        report[name + " text"] = tokenizer.decode(on.token_ids)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
