"""Counts the prompts to which two packages begin the same greedy answer.

Usage: python scripts/compare_greedy.py PACKAGE REFERENCE [--tokens N] [--prompts FILE] [--json FILE]

PACKAGE answers through the engine; REFERENCE then reads each prompt with that answer in one pass. If its likeliest
token is the answer's at every position, its own greedy answer is the same. An answer that ends early has to end for
both. The margin of a parting is how much likelier, in nats, REFERENCE finds its own token there than the answer's.
FILE is a JSON array of user messages (default: tests/data/greedy_prompts.json).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from qwenonnx.engine.load import LoadedModel, load_model
from qwenonnx.engine.request import Delta, Failed, Finished, GenerationRequest
from qwenonnx.package.package import Package
from qwenonnx.runtime.load import PackageRunner, load_runner, session_config
from qwenonnx.text.tokenizer import end_token_ids

PROMPTS = Path(__file__).parents[1] / "tests" / "data" / "greedy_prompts.json"
CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt, the candidate's answer, and after how many of its tokens the reference says something else."""

    prompt: str
    answer: str
    parts_at: int | None
    reference_says: str | None
    margin: float | None


def answer_ids(model: LoadedModel, prompt: Sequence[int], count: int) -> tuple[list[int], bool]:
    """The first tokens of a greedy answer, and whether it ended of itself before there were `count`.

    Raises:
        QwenonnxError: the engine failed.
    """
    ids: list[int] = []
    ended = False
    with model.engine.generate(GenerationRequest(tuple(prompt), max_tokens=count)) as events:
        for event in events:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Delta):
                ids += event.token_ids
            elif isinstance(event, Finished):
                ended = event.reason == "stop"
    return ids, ended


def parting(
    reference: PackageRunner, prompt: Sequence[int], answer: Sequence[int], ends: frozenset[int], num_tokens: int
) -> tuple[int, int, float] | None:
    """Where the reference's greedy answer parts from `answer`, with which token and margin; None where it does not.

    Tokens of `ends` are one: at all of them an answer is over.
    """
    logits = reference.score([*prompt, *answer], 0)[len(prompt) - 1 :, :num_tokens]
    said = [int(token) for token in np.argmax(logits, axis=-1)]
    for position, (theirs, ours) in enumerate(zip(said, answer, strict=False)):
        if theirs != ours and not {theirs, ours} <= ends:
            return position, theirs, float(logits[position, theirs] - logits[position, ours])
    return None


def compare(model: LoadedModel, reference: PackageRunner, prompts: Sequence[str], count: int) -> list[Answered]:
    """Asks all questions."""
    tokenizer = model.tokenizer
    ends = frozenset(end_token_ids(tokenizer, model.package.generation_config))
    results = []
    for text in prompts:
        prompt = model.chat_template.encode([{"role": "user", "content": text}])
        ids, ended = answer_ids(model, prompt, count)
        compared = [token for token in ids if token not in ends]
        if ended:
            compared.append(min(ends))
        found = parting(reference, prompt, compared, ends, model.package.manifest.num_tokens)
        place, token, margin = found if found is not None else (None, None, None)
        says = None if token is None else tokenizer.decode([token])
        results.append(Answered(text, tokenizer.decode(ids), place, says, margin))
    return results


def main() -> None:
    """Prints the answers that part, and how many do not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("package", type=Path)
    parser.add_argument("reference", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    prompts: list[str] = json.loads(arguments.prompts.read_text(encoding="utf-8"))
    package, other = Package.open(arguments.package), Package.open(arguments.reference)
    context = min(CONTEXT, package.config.context_length)
    reference = load_runner(other, session_config(), context_length=context)
    model = load_model(package, session_config(), context_length=context)
    model.engine.start()
    try:
        results = compare(model, reference, prompts, arguments.tokens)
    finally:
        model.engine.close()
    for result in results:
        if result.parts_at is not None:
            print(f"after {result.parts_at:2} tokens: {result.prompt!r}\n    {result.answer!r}")
            print(f"    the reference says {result.reference_says!r} there, with a margin of {result.margin:.3f}")
    agreeing = sum(result.parts_at is None for result in results)
    print(f"{agreeing} of {len(results)} answers begin with the same {arguments.tokens} tokens")
    if arguments.json:
        report = {"agreeing": agreeing, "prompts": len(results), "answers": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
