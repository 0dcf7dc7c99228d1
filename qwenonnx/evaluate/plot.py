"""A plot of how faithful packages are: KL divergence by text, a marker for each package."""

from __future__ import annotations

import io
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwenonnx.errors import UsageError
from qwenonnx.evaluate.fidelity import FidelityReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
# What is equal has a KL of 0 but for rounding, which a logarithmic axis cannot show: it is drawn here.
SMALLEST = 1e-6
LONGEST_LABEL = 40
# Okabe and Ito's colours, which people with colour blindness can tell apart, each with a shape of its own.
_STYLES = (
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "D"),
    ("#CC79A7", "^"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
    ("#000000", "X"),
)


def check_plot_path(path: Path) -> None:
    """Checks before the work that a plot can be drawn to `path`.

    Raises:
        UsageError: its name ends in neither .png nor .svg, or matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path}: a plot is written as {' or '.join(SUFFIXES)}; let the name end in one of these.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("a plot needs matplotlib, which is not installed: pip install 'qwenonnx[plot]'") from error


def plot_reports(reports: Mapping[str, FidelityReport], reference: str, path: Path) -> None:
    """Draws the mean KL of every text for each named report, which must be of the same texts, to a PNG or SVG file.

    Texts are sorted by the first report, the most faithful one on top; `reference` is named in the title.
    """
    import matplotlib
    from matplotlib.figure import Figure

    order = sorted(next(iter(reports.values())).texts, key=lambda text: text.comparison.kl_mean)
    names = [text.name for text in order]
    content = io.BytesIO()
    settings = matplotlib.rc_context(
        {
            "svg.hashsalt": "qwenonnx",  # equal figures give equal bytes
            "svg.fonttype": "none",  # text stays text: small, searchable, and in the reader's fonts
            "text.parse_math": False,  # a dollar sign in a name is a dollar sign
            "font.size": 9,
        }
    )
    with settings, warnings.catch_warnings():
        # A name's letters may be missing in matplotlib's font; in an SVG the reader's font has them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(7.5, 1.5 + 0.24 * len(names)), layout="constrained")
        axes = figure.add_subplot()
        _draw(axes, reports, names)
        axes.set_title(f"KL divergence from {reference}, by text", loc="left", fontsize=11)
        figure.legend(loc="outside lower center", ncols=min(len(reports), 3), frameon=False)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {"Software": None}
        figure.savefig(content, format=path.suffix.lower().removeprefix("."), dpi=150, metadata=metadata)
    _replace(path, content.getvalue())


def _draw(axes: Axes, reports: Mapping[str, FidelityReport], names: Sequence[str]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    rows = range(len(names))
    values = [
        {text.name: max(text.comparison.kl_mean, SMALLEST) for text in report.texts} for report in reports.values()
    ]
    for row, name in zip(rows, names, strict=True):
        found = [by_name[name] for by_name in values]
        axes.plot([min(found), max(found)], [row, row], color="#D0D0D0", linewidth=1, zorder=1)
    for i, ((name, report), by_name) in enumerate(zip(reports.items(), values, strict=True)):
        color, marker = _STYLES[i % len(_STYLES)]
        axes.scatter(
            [by_name[text] for text in names],
            rows,
            s=26,
            color=color,
            marker=marker,
            zorder=2,
            label=f"{_shortened(name)} (overall {report.overall.kl_mean:.5f})",
        )
    axes.set_xscale("log")
    smallest, largest = (choose(choose(by_name.values()) for by_name in values) for choose in (min, max))
    if largest < 4 * smallest:  # so near each other that no round number might be between them
        axes.set_xlim(smallest / 2, largest * 2)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if largest < 1000 * smallest else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("mean KL divergence per token, in nats (logarithmic; smaller is more faithful)")
    axes.set_yticks(list(rows), [_shortened(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="x", which="major", color="#E4E4E4", zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _shortened(name: str) -> str:
    return name if len(name) <= LONGEST_LABEL else f"{name[: LONGEST_LABEL - 1]}…"


def _replace(path: Path, content: bytes) -> None:
    """Puts a file in place at once."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".plot.", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
