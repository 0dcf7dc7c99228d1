"""The `qwenonnx` command: its sub-commands, and how errors become exit codes."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from qwenonnx import __version__
from qwenonnx.cli.adopt import adopt
from qwenonnx.cli.bench import bench
from qwenonnx.cli.chat import chat
from qwenonnx.cli.evaluate import evaluate
from qwenonnx.cli.export import export
from qwenonnx.cli.fetch import EXIT_INTERRUPTED
from qwenonnx.cli.inspect import inspect
from qwenonnx.cli.pull import pull
from qwenonnx.cli.quantize import quantize
from qwenonnx.cli.serve import serve
from qwenonnx.cli.verify import verify
from qwenonnx.errors import QwenonnxError, UsageError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_SIGNAL = 128


class ErrorReporting(TyperGroup):
    """Turns errors raised on purpose into one sentence on stderr and an exit code; `--debug` shows the traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the sub-command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except (QwenonnxError, OSError) as error:
            if ctx.params.get("debug"):
                raise
            if isinstance(error, BrokenPipeError):  # `qwenonnx … | head` is no fault
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(EXIT_FAILED) from None
            print(f"qwenonnx: {error}", file=sys.stderr)
            raise typer.Exit(EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED) from None


class Command(TyperCommand):
    """A sub-command whose usage line names arguments without braces."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The parts of the usage line after the command's name."""
        return [piece.removeprefix("{").removesuffix("}") for piece in super().collect_usage_pieces(ctx)]


app = typer.Typer(
    cls=ErrorReporting,
    name="qwenonnx",
    help="Qwen2-0.5B as ONNX: export with a KV cache, quantize without damage, serve on ordinary CPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"qwenonnx {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Qwen2-0.5B as ONNX: export with a KV cache, quantize without damage, serve on ordinary CPUs."""


app.command(cls=Command)(pull)
app.command(cls=Command)(export)
app.command(cls=Command)(adopt)
app.command(cls=Command)(quantize)
app.command("eval", cls=Command)(evaluate)
app.command(cls=Command)(verify)
app.command(cls=Command)(serve)
app.command(cls=Command)(chat)
app.command(cls=Command)(bench)
app.command(cls=Command)(inspect)


def main() -> None:
    """Entry point of the command. SIGTERM and Ctrl-C end it in order, so that nothing half-written is left."""
    signal.signal(signal.SIGTERM, _leave)  # while serving, the server's own handler stands in its place
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(EXIT_SIGNAL + number)
