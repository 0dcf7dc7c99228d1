"""The Qwen2 decoder as one ONNX graph with a KV cache, written layer by layer.

Inputs: `input_ids` [1, tokens] int64, the new tokens of all rows behind each other; `logits_rows` [rows] int64, which
of them get logits; those of `graph.attention`, which lay them out as a batch;
`past_key_values.{i}.key|value` [batch, kv_heads, capacity, head_dim].
Outputs: `logits` [rows, vocab]; `present.{i}.key|value`, which may share memory with the past.

Attention is onnxruntime's `com.microsoft.GroupQueryAttention` with its own rotary embedding. After the last layer's
attention only the rows that get logits are carried on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qwenonnx.config import ModelConfig
from qwenonnx.graph.attention import declare_attention_inputs, write_attention
from qwenonnx.graph.builder import GraphBuilder
from qwenonnx.graph.linear import LinearStyle
from qwenonnx.graph.names import past_names, present_names
from qwenonnx.graph.rope import rotary_tables
from qwenonnx.graph.rows import ALL_TOKENS, LOGITS_ROWS, Rows
from qwenonnx.graph.weights import Weights

MS = "com.microsoft"


def write_decoder(g: GraphBuilder, config: ModelConfig, weights: Weights, style: LinearStyle) -> None:
    """Writes the whole graph; `style` decides how the linears look."""
    Decoder(g, config, weights, style).write()


class Decoder:
    """Writes the nodes of one decoder; `rows.Rows` tells the shapes of hidden states."""

    def __init__(self, g: GraphBuilder, config: ModelConfig, weights: Weights, style: LinearStyle) -> None:
        self._g = g
        self._config = config
        self._weights = weights
        self._style = style

    def write(self) -> None:
        """Writes inputs, embedding, layers, head and outputs."""
        g, config = self._g, self._config
        cache_shape = ("batch", config.num_kv_heads, "capacity", config.head_dim)
        g.input("input_ids", np.int64, (1, "tokens"))
        g.input("logits_rows", np.int64, ("rows",))
        declare_attention_inputs(g, config)
        for name in past_names(config):
            g.input(name, np.float32, cache_shape)
        g.output("logits", np.float32, ("rows", config.vocab_size))
        for name in present_names(config):
            g.output(name, np.float32, cache_shape)

        cos, sin = rotary_tables(config)
        g.weight("cos_cache", cos)
        g.weight("sin_cache", sin)

        self._style.begin(g, self._weights, config)
        residual = self._style.embed(g, "input_ids")
        hidden = self._norm(residual, "model.layers.0.input_layernorm")
        for i in range(config.num_layers):
            hidden, residual = self._layer(i, hidden, residual)
        self._style.head(g, hidden, width=config.hidden_size, rows=LOGITS_ROWS)

    def _layer(self, i: int, hidden: str, residual: str) -> tuple[str, str]:
        """One layer; takes and returns (normed hidden state, residual), the norm being the next one's."""
        last = i + 1 == self._config.num_layers
        prefix = f"model.layers.{i}"
        rows = LOGITS_ROWS if last else ALL_TOKENS
        attention = self._attention(i, f"{prefix}.self_attn", hidden)
        if last:
            attention = self._pick_rows(attention, self._config.q_size, f"{prefix}.self_attn")
            residual = self._pick_rows(residual, self._config.hidden_size, f"{prefix}.residual")
        attention = self._output_linear(f"{prefix}.self_attn.o_proj", attention, rows)
        hidden, residual = self._add_norm(attention, residual, f"{prefix}.post_attention_layernorm")
        output = self._mlp(f"{prefix}.mlp", hidden, rows)
        following = "model.norm" if last else f"model.layers.{i + 1}.input_layernorm"
        return self._add_norm(output, residual, following)

    def _attention(self, i: int, prefix: str, hidden: str) -> str:
        g, config = self._g, self._config
        parts = [f"{prefix}.{kind}_proj" for kind in "qkv"]
        qkv = self._joined_linear(f"{prefix}.qkv_proj", hidden, parts)
        return write_attention(g, config, i, qkv, f"{prefix}.attention")

    def _mlp(self, prefix: str, hidden: str, rows: Rows) -> str:
        g, config, style, weights = self._g, self._config, self._style, self._weights
        x = style.operand(g, hidden, f"{prefix}.input", width=config.hidden_size, rows=rows)
        gate = style.linear(g, x, [f"{prefix}.gate_proj.weight"], weights, f"{prefix}.gate_proj")
        up = style.linear(g, x, [f"{prefix}.up_proj.weight"], weights, f"{prefix}.up_proj")
        gate_value = style.scaled(g, gate, f"{prefix}.gate_proj")
        # SiLU; the fused operator computes x * sigmoid(alpha * x).
        gate_value = g.node("QuickGelu", [gate_value], f"{prefix}.silu", domain=MS, attributes={"alpha": 1.0})
        product = g.node("Mul", [gate_value, up.value], f"{prefix}.gated")
        # The row scale of `up` is left to the operand of down_proj, where it costs one number per row.
        width = config.intermediate_size
        x = style.down_operand(g, product, f"{prefix}.down_input", width=width, rows=rows, scale=up.scale)
        down = style.linear(g, x, [f"{prefix}.down_proj.weight"], weights, f"{prefix}.down_proj")
        return style.scaled(g, down, f"{prefix}.down_proj")

    def _output_linear(self, name: str, value: str, rows: Rows) -> str:
        g, style = self._g, self._style
        x = style.operand(g, value, f"{name}.input", width=self._config.q_size, rows=rows)
        return style.scaled(g, style.linear(g, x, [f"{name}.weight"], self._weights, name), name)

    def _joined_linear(self, name: str, value: str, parts: Sequence[str]) -> str:
        g, style = self._g, self._style
        x = style.operand(g, value, f"{name}.input", width=self._config.hidden_size, rows=ALL_TOKENS)
        product = style.linear(g, x, [f"{part}.weight" for part in parts], self._weights, name)
        bias = np.concatenate([self._weights.tensor(f"{part}.bias") for part in parts])
        return g.node("Add", [style.scaled(g, product, name), g.weight(f"{name}.bias", bias)], f"{name}/biased")

    def _pick_rows(self, value: str, width: int, name: str) -> str:
        """Of the rows of `[batch, sequence, width]` those that get logits: `[rows, width]`."""
        g = self._g
        shape = g.constant(f"flat_{width}", np.array([-1, width], dtype=np.int64))
        flat = g.node("Reshape", [value, shape], f"{name}/flat")
        return g.node("Gather", [flat, LOGITS_ROWS.name], f"{name}/rows", attributes={"axis": 0})

    def _gain(self, name: str) -> str:
        return self._g.weight(f"{name}.weight", self._weights.tensor(f"{name}.weight"))

    def _norm_attributes(self) -> dict[str, float]:
        return {"epsilon": self._config.rms_norm_eps}

    def _norm(self, value: str, name: str) -> str:
        attributes = {**self._norm_attributes(), "axis": -1}
        return self._g.node("SimplifiedLayerNormalization", [value, self._gain(name)], name, attributes=attributes)

    def _add_norm(self, value: str, residual: str, name: str) -> tuple[str, str]:
        """Adds to the residual stream; returns the normed sum and the sum."""
        outputs = [name, "", "", f"{name}/residual"]
        hidden = self._g.node(
            "SkipSimplifiedLayerNormalization",
            [value, residual, self._gain(name)],
            name,
            outputs=outputs,
            domain=MS,
            attributes=self._norm_attributes(),
        )
        return hidden, outputs[3]
