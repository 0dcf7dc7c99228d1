"""How linears, embedding and head are written: the part of the graph that a recipe swaps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig
from qwenonnx.graph.builder import GraphBuilder
from qwenonnx.graph.folding import Folding
from qwenonnx.graph.rows import Rows
from qwenonnx.graph.weights import Weights

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Operand:
    """The input of one or more linears: a value `[..., K]`, perhaps quantized with a scale per row `[..., 1]`."""

    value: str
    scale: str | None = None


@dataclass(frozen=True, slots=True)
class Product:
    """What a linear yields: a value `[..., N]`, still to be multiplied by `scale` `[..., 1]` where there is one."""

    value: str
    scale: str | None = None


class LinearStyle(ABC):
    """Writes the linears of a decoder, whose weights have been folded to match `folding`. `Rows` tells the shapes."""

    def __init__(self, folding: Folding | None = None) -> None:
        self._folding = folding or Folding()

    def begin(self, g: GraphBuilder, weights: Weights, config: ModelConfig) -> None:
        """Adds what the whole graph shares; called once, before anything else."""
        self.share(g, config)
        for name in matrix_names(config):
            self.add_matrix(g, name, weights)
        self._folding.begin(g, config)

    def share(self, g: GraphBuilder, config: ModelConfig) -> None:
        """Adds small constants of this style, which may be one of several in a graph."""
        return  # by default there are none

    @abstractmethod
    def add_matrix(self, g: GraphBuilder, name: str, weights: Weights) -> None:
        """Adds the embedding or the head; the one added last serves as head."""

    @abstractmethod
    def embed(self, g: GraphBuilder, ids: str) -> str:
        """Rows of the embedding for ids `[batch, sequence]`: `[batch, sequence, hidden]`."""

    def operand(
        self, g: GraphBuilder, value: str, name: str, *, width: int, rows: Rows, scale: str | None = None
    ) -> Operand:
        """Prepares `value` `[..., width]` (times `scale`, where given) as the input of one or more linears."""
        if scale is not None:
            value = g.node("Mul", [value, scale], f"{name}/scaled_input")
        return Operand(value)

    @abstractmethod
    def linear(self, g: GraphBuilder, x: Operand, names: Sequence[str], weights: Weights, name: str) -> Product:
        """One product with the weights `names` joined along their outputs, called `name`, without bias."""

    def skip(self, names: Sequence[str], weights: Weights, name: str) -> None:
        """Is told of a linear that another style writes in its place, in fp32."""
        return  # most styles write each linear without a thought of the others

    @abstractmethod
    def head(self, g: GraphBuilder, hidden: str, *, width: int, rows: Rows) -> str:
        """Logits `[rows, vocab]` of normed hidden states `[rows, width]`."""

    def scaled(self, g: GraphBuilder, product: Product, name: str) -> str:
        """The finished value of a product."""
        if product.scale is None:
            return product.value
        return g.node("Mul", [product.value, product.scale], f"{name}/scaled")

    def down_operand(
        self, g: GraphBuilder, value: str, name: str, *, width: int, rows: Rows, scale: str | None = None
    ) -> Operand:
        """Prepares the input of down_proj, its blocks rotated where the weights are."""
        value = self._folding.rotate_down(g, value, name, rows)
        return self.operand(g, value, name, width=width, rows=rows, scale=scale)


def matrix_names(config: ModelConfig) -> tuple[str, ...]:
    """The embedding, and the head where it is a matrix of its own."""
    return (EMBEDDING,) if config.tie_word_embeddings else (EMBEDDING, HEAD)


def joined(weights: Weights, names: Sequence[str]) -> NDArray[np.float32]:
    """The tensors `names`, joined along their first axis."""
    parts = [weights.tensor(name) for name in names]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class FloatLinears(LinearStyle):
    """Plain fp32: `MatMul` with weights `[K, N]`, and one matrix for embedding and head (`Gemm`) if they are tied."""

    def __init__(self, folding: Folding | None = None) -> None:
        super().__init__(folding)
        self._head = ""

    def add_matrix(self, g: GraphBuilder, name: str, weights: Weights) -> None:
        """Adds it in fp32."""
        self._head = g.weight(name, weights.tensor(name))

    def embed(self, g: GraphBuilder, ids: str) -> str:
        """Gathers rows."""
        return g.node("Gather", [EMBEDDING, ids], "model.embed_tokens", attributes={"axis": 0})

    def linear(self, g: GraphBuilder, x: Operand, names: Sequence[str], weights: Weights, name: str) -> Product:
        """A matrix product."""
        weight = g.weight(f"{name}.weight", np.ascontiguousarray(joined(weights, names).T))
        return Product(g.node("MatMul", [x.value, weight], name))

    def head(self, g: GraphBuilder, hidden: str, *, width: int, rows: Rows) -> str:
        """A product with the rows of the embedding (or of the untied head)."""
        hidden = self._folding.before_head(g, hidden)
        return g.node("Gemm", [hidden, self._head], "logits", attributes={"transB": 1})


def scalar(value: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """A rank-0 tensor."""
    return np.array(value, dtype=dtype)
