"""`qwenonnx verify`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qwenonnx.cli.console import Stages, say, table, write_results
from qwenonnx.cli.options import JsonFile, Quiet, Threads
from qwenonnx.cli.packages import open_package
from qwenonnx.errors import UsageError, VerificationError

if TYPE_CHECKING:
    from qwenonnx.config import ModelConfig
    from qwenonnx.evaluate.fidelity import Scorer
    from qwenonnx.evaluate.parity import Parity, TokenText
    from qwenonnx.evaluate.texts import EvaluationText
    from qwenonnx.runtime.session import SessionConfig
    from qwenonnx.text.tokenizer import Tokenizer

DEFAULT_TOLERANCE = 5e-3


def verify(
    package: Annotated[Path, typer.Argument(metavar="A", help="The package.", show_default=False)],
    other: Annotated[
        Path,
        typer.Argument(
            metavar="B",
            help="Another package of the model, or a checkpoint (folder or .gguf file), which is run in PyTorch.",
            show_default=False,
        ),
    ],
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", metavar="FILE", help="A text of your own, instead of the bundled ones; repeatable."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=2, help="Tokens of each text to compare.")
    ] = 128,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Tokens of each text to run one by one as well.")
    ] = 8,
    tolerance: Annotated[
        float, typer.Option("--tolerance", metavar="X", min=0.0, help="How far two fp32 logits may be apart.")
    ] = DEFAULT_TOLERANCE,
    json: JsonFile = None,
    threads: Threads = None,
    quiet: Quiet = False,
) -> None:
    """Check that a package computes the same as another or as PyTorch.

    Compared are the likeliest token and the logits at every position, A against B, and A against itself with texts in
    chunks, token by token and in a batch. Fails, with exit code 1, if both are fp32 and a likeliest token is another
    one (that is not as likely within rounding) or a logit differs by more than the tolerance. Quantized packages are
    not judged: `qwenonnx eval` measures what they cost.
    """
    from qwenonnx.evaluate.parity import ROWS, Parity, TokenText, compare_models, compare_pieces
    from qwenonnx.evaluate.texts import bundled_texts, read_texts
    from qwenonnx.runtime.load import load_runner, session_config
    from qwenonnx.text.tokenizer import Tokenizer

    opened = open_package(package)
    texts = read_texts(text) if text else bundled_texts()
    with Stages(quiet=quiet) as stages:
        stages.begin("loading both")
        session = session_config(threads)
        tokenizer = Tokenizer.load(opened.folder)
        length = min(max_tokens, opened.manifest.context_length)
        encoded = [TokenText(entry.name, tuple(tokenizer.encode(entry.text)[:length])) for entry in texts]
        reference, recipe, other_tokenizer = _open_other(other, opened.config, session, length)
        _check_same_tokens(other, other_tokenizer, texts, encoded)
        runner = load_runner(opened, session, context_length=length, num_slots=ROWS)
        results = compare_models(reference, runner, encoded, stages.begin("comparing"))
        pieces = compare_pieces(runner, encoded, steps, stages.begin("running A in pieces"))
    overall = sum(results, Parity())
    quantized = [
        f"{folder} ({kind})" for folder, kind in ((package, opened.manifest.recipe), (other, recipe)) if kind != "fp32"
    ]
    problems = [] if quantized else _problems(overall, pieces, tolerance)
    named = {entry.name: parity for entry, parity in zip(encoded, results, strict=True)}
    if json is None or str(json) != "-":
        print(_report(named, overall, pieces))
    write_results(json, _figures(named, overall, pieces, None if quantized else not problems, tolerance))
    if problems:
        raise VerificationError(f"{package} and {other} do not compute the same: {'; '.join(problems)}.")
    if not quiet and quantized:
        say(
            f"not judged, since {' and '.join(quantized)} is not fp32: such differences are the price of a smaller "
            "model; `qwenonnx eval` measures it"
        )
    elif not quiet:
        say(f"the same: every likeliest token, and all logits within {tolerance:g}")


def _open_other(path: Path, config: ModelConfig, session: SessionConfig, length: int) -> tuple[Scorer, str, Tokenizer]:
    """The model that B names, its recipe (a checkpoint's weights count as fp32), and its tokenizer.

    Raises:
        UsageError: it is a checkpoint and there is no torch, or it is another model.
    """
    from qwenonnx.package.manifest import is_package
    from qwenonnx.text.tokenizer import Tokenizer

    if is_package(path) or not path.exists():
        from qwenonnx.runtime.load import load_runner

        opened = open_package(path)
        _check_same_model(path, opened.config, config)
        runner = load_runner(opened, session, context_length=min(length, opened.manifest.context_length))
        return runner, opened.manifest.recipe, Tokenizer.load(opened.folder)
    from qwenonnx.checkpoint.open import open_checkpoint
    from qwenonnx.export.torch_extra import TorchModel, require_torch

    checkpoint = open_checkpoint(path)
    _check_same_model(path, checkpoint.config, config)
    require_torch()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.write_tokenizer(Path(folder))
        tokenizer = Tokenizer.load(Path(folder))
    return TorchModel(checkpoint, session.threads), "fp32", tokenizer


def _check_same_model(path: Path, found: ModelConfig, config: ModelConfig) -> None:
    if (found.vocab_size, found.num_layers, found.hidden_size) != (
        config.vocab_size,
        config.num_layers,
        config.hidden_size,
    ):
        raise UsageError(
            f"{path}: this is another model than A ({found.num_layers} layers of {found.hidden_size}, "
            f"{found.vocab_size:,} rows of vocabulary against {config.num_layers} of {config.hidden_size}, "
            f"{config.vocab_size:,}); name a package of the same model."
        )


def _check_same_tokens(
    path: Path, tokenizer: Tokenizer, texts: Sequence[EvaluationText], encoded: Sequence[TokenText]
) -> None:
    """The two must read a text as the same tokens, or users get other answers whatever the logits are.

    Raises:
        VerificationError: they do not; the text is named.
    """
    for text, tokens in zip(texts, encoded, strict=True):
        if tuple(tokenizer.encode(text.text)[: len(tokens.ids)]) != tokens.ids:
            raise VerificationError(
                f"{path}: its tokenizer splits the text {text.name!r} into other tokens than A's; one of the two has "
                "the tokenizer of another model."
            )


def _problems(overall: Parity, pieces: Mapping[str, Parity], tolerance: float) -> list[str]:
    """What is wrong, in words; nothing where all is the same."""
    ways = {"A against B": overall, **{f"A {name}": parity for name, parity in pieces.items()}}
    return [f"{name}, {_describe(parity)}" for name, parity in ways.items() if not parity.holds(tolerance)]


def _describe(parity: Parity) -> str:
    other = parity.positions - parity.same - parity.ties
    tokens = f"another likeliest token at {other:,} of {parity.positions:,} positions and " if other else ""
    place = f"position {parity.position} of {parity.text}"
    return f"{tokens}a largest logit difference of {parity.largest_difference:.1e} ({place})"


def _report(texts: Mapping[str, Parity], overall: Parity, pieces: Mapping[str, Parity]) -> str:
    headers = ["A against B", "tokens", "same top", "as likely", "widest margin", "largest difference", "at"]
    first = table(headers, [_row(name, parity, str(parity.position)) for name, parity in texts.items()])
    ways = {"A against B": overall, **{f"A {name}": parity for name, parity in pieces.items()}}
    rows = [_row(name, parity, f"{parity.text} {parity.position}") for name, parity in ways.items()]
    return f"{first}\n\n{table(['overall', *headers[1:]], rows)}"


def _row(name: str, parity: Parity, place: str) -> list[str]:
    return [
        name,
        f"{parity.positions:,}",
        f"{parity.same:,}",
        f"{parity.ties:,}",
        f"{parity.widest_margin:.4f}",
        f"{parity.largest_difference:.2e}",
        place,
    ]


def _figures(
    texts: Mapping[str, Parity],
    overall: Parity,
    pieces: Mapping[str, Parity],
    holds: bool | None,
    tolerance: float,
) -> dict[str, Any]:
    return {
        "holds": holds,
        "tolerance": tolerance,
        "overall": overall.to_json(),
        "texts": {name: parity.to_json() for name, parity in texts.items()},
        "pieces": {name: parity.to_json() for name, parity in pieces.items()},
    }
