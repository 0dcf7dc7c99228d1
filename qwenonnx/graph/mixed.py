"""Graphs in which some linears stay in fp32 while the others are quantized."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from qwenonnx.config import ModelConfig
from qwenonnx.graph.builder import GraphBuilder
from qwenonnx.graph.folding import Folding
from qwenonnx.graph.linear import EMBEDDING, FloatLinears, LinearStyle, Operand, Product, matrix_names
from qwenonnx.graph.rows import Rows
from qwenonnx.graph.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingOperand(Operand):
    """An input that is prepared when it is known which style reads it; `name`, `width` and `rows` as in `operand`."""

    name: str
    width: int
    rows: Rows


class MixedLinears(LinearStyle):
    """Writes the linears in `kept` in fp32 and the others in the style `quantized`, which has the same folding.

    Names are those of `LinearStyle.linear`; `model.embed_tokens` and `lm_head` stand for embedding and head, which are
    one matrix where they are tied: then the embedding's name counts.
    """

    def __init__(self, quantized: LinearStyle, kept: AbstractSet[str], folding: Folding | None = None) -> None:
        super().__init__(folding)
        self._quantized = quantized
        self._float = FloatLinears(folding)
        self._kept = kept
        self._head_style: LinearStyle = quantized
        self._prepared: dict[tuple[str, LinearStyle], Operand] = {}

    def begin(self, g: GraphBuilder, weights: Weights, config: ModelConfig) -> None:
        """Adds what the whole graph shares."""
        super().begin(g, weights, config)
        self._head_style = self._style_of(matrix_names(config)[-1])

    def share(self, g: GraphBuilder, config: ModelConfig) -> None:
        """Adds the constants of the quantized style; fp32 has none."""
        self._quantized.share(g, config)

    def add_matrix(self, g: GraphBuilder, name: str, weights: Weights) -> None:
        """Adds the embedding or the head in its style."""
        self._style_of(name).add_matrix(g, name, weights)

    def embed(self, g: GraphBuilder, ids: str) -> str:
        """Rows of the embedding."""
        return self._style_of(EMBEDDING).embed(g, ids)

    def operand(
        self, g: GraphBuilder, value: str, name: str, *, width: int, rows: Rows, scale: str | None = None
    ) -> Operand:
        """Only remembers the input: which styles will read it is not known yet."""
        return PendingOperand(value, scale, name=name, width=width, rows=rows)

    def linear(self, g: GraphBuilder, x: Operand, names: Sequence[str], weights: Weights, name: str) -> Product:
        """One product, in the linear's style."""
        style = self._style_of(name)
        if style is self._float:
            self._quantized.skip(names, weights, name)
        return style.linear(g, self._ready(g, x, style), names, weights, name)

    def head(self, g: GraphBuilder, hidden: str, *, width: int, rows: Rows) -> str:
        """Logits, in the head's style."""
        return self._head_style.head(g, hidden, width=width, rows=rows)

    def _style_of(self, name: str) -> LinearStyle:
        return self._float if name.removesuffix(".weight") in self._kept else self._quantized

    def _ready(self, g: GraphBuilder, x: Operand, style: LinearStyle) -> Operand:
        if not isinstance(x, PendingOperand):
            raise ValueError("this operand was prepared by another style")
        key = x.name, style
        if key not in self._prepared:
            self._prepared[key] = style.operand(g, x.value, x.name, width=x.width, rows=x.rows, scale=x.scale)
        return self._prepared[key]
