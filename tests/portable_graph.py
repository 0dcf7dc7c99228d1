"""A small decoder as other exporters write it: standard operators, a growing KV cache, an attention mask."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from packages import ArrayWeights, small_model

from qwenonnx.config import ModelConfig
from qwenonnx.graph.builder import GraphBuilder
from qwenonnx.graph.names import past_names, present_names
from qwenonnx.package.manifest import DATA_NAME, MODEL_NAME
from qwenonnx.package.package import Package
from qwenonnx.package.writer import TEXT_FILES, finish_package

INPUTS = ("input_ids", "attention_mask", "position_ids")


class PortableGraph:
    """Writes the nodes; those of linears are called as Optimum calls them."""

    def __init__(self, g: GraphBuilder, config: ModelConfig, weights: ArrayWeights) -> None:
        self._g = g
        self._config = config
        self._tensors = weights.tensors

    def write(self) -> None:
        g, config = self._g, self._config
        cache = ("batch", config.num_kv_heads, "past", config.head_dim)
        g.input("input_ids", np.int64, ("batch", "sequence"))
        g.input("attention_mask", np.int64, ("batch", "total"))
        g.input("position_ids", np.int64, ("batch", "sequence"))
        for name in past_names(config):
            g.input(name, np.float32, cache)
        g.output("logits", np.float32, ("batch", "sequence", config.vocab_size))
        for name in present_names(config):
            g.output(name, np.float32, ("batch", config.num_kv_heads, "total", config.head_dim))
        embedding = g.weight("model.embed_tokens.weight", self._tensors["model.embed_tokens.weight"])
        x = g.node("Gather", [embedding, "input_ids"], "/model/embed_tokens/Gather")
        mask, cos, sin = self._mask(), *self._rotary()
        for i in range(config.num_layers):
            x = self._layer(i, x, mask, cos, sin)
        x = self._norm(x, "model.norm")
        if config.tie_word_embeddings:
            head = g.node("Transpose", [embedding], "/lm_head/Transpose", attributes={"perm": [1, 0]})
        else:
            head = g.weight("lm_head.transposed", np.ascontiguousarray(self._tensors["lm_head.weight"].T))
        g.node("MatMul", [x, head], "/lm_head/MatMul", outputs=["logits"])

    def _layer(self, i: int, x: str, mask: str, cos: str, sin: str) -> str:
        g = self._g
        name = f"model.layers.{i}"
        attention = self._attention(i, self._norm(x, f"{name}.input_layernorm"), mask, cos, sin)
        x = g.node("Add", [x, attention], f"{name}/added")
        hidden = self._norm(x, f"{name}.post_attention_layernorm")
        gate, up = (self._linear(hidden, f"{name}.mlp.{kind}_proj") for kind in ("gate", "up"))
        gate = g.node("Mul", [gate, g.node("Sigmoid", [gate], f"{name}/sigmoid")], f"{name}/silu")
        down = self._linear(g.node("Mul", [gate, up], f"{name}/gated"), f"{name}.mlp.down_proj")
        return g.node("Add", [x, down], f"{name}/output")

    def _attention(self, i: int, x: str, mask: str, cos: str, sin: str) -> str:
        g, config = self._g, self._config
        name = f"model.layers.{i}.self_attn"
        heads = [self._heads(self._linear(x, f"{name}.{kind}_proj", bias=True), f"{name}/{kind}") for kind in "qkv"]
        query, key = (self._rotate(value, cos, sin, f"{name}/{kind}") for value, kind in zip(heads, "qk", strict=False))
        states = []
        for value, kind in ((key, "key"), (heads[2], "value")):
            joined = [f"past_key_values.{i}.{kind}", value]
            g.node("Concat", joined, f"{name}/{kind}", outputs=[f"present.{i}.{kind}"], attributes={"axis": 2})
            states.append(self._repeat(f"present.{i}.{kind}", f"{name}/{kind}"))
        turned = g.node("Transpose", [states[0]], f"{name}/turned", attributes={"perm": [0, 1, 3, 2]})
        scores = g.node("MatMul", [query, turned], f"/model/layers.{i}/self_attn/MatMul")
        factor = g.constant("factor", np.array(config.head_dim**-0.5, dtype=np.float32))
        scores = g.node("Add", [g.node("Mul", [scores, factor], f"{name}/scaled"), mask], f"{name}/masked")
        shares = g.node("Softmax", [scores], f"{name}/softmax", attributes={"axis": -1})
        mixed = g.node("MatMul", [shares, states[1]], f"/model/layers.{i}/self_attn/MatMul_1")
        mixed = g.node("Transpose", [mixed], f"{name}/mixed", attributes={"perm": [0, 2, 1, 3]})
        mixed = g.node("Reshape", [mixed, self._shape(0, 0, -1)], f"{name}/rows")
        return self._linear(mixed, f"{name}.o_proj")

    def _linear(self, x: str, name: str, *, bias: bool = False) -> str:
        g = self._g
        weight = g.weight(f"onnx::{name}", np.ascontiguousarray(self._tensors[f"{name}.weight"].T))
        product = g.node("MatMul", [x, weight], "/" + name.replace(".", "/").replace("layers/", "layers.") + "/MatMul")
        if not bias:
            return product
        return g.node("Add", [product, g.weight(f"{name}.bias", self._tensors[f"{name}.bias"])], f"{name}/biased")

    def _norm(self, x: str, name: str) -> str:
        g = self._g
        squares = g.node("Mul", [x, x], f"{name}/squares")
        mean = g.node("ReduceMean", [squares, self._shape(-1)], f"{name}/mean", attributes={"keepdims": 1})
        epsilon = g.constant("epsilon", np.array(self._config.rms_norm_eps, dtype=np.float32))
        root = g.node("Sqrt", [g.node("Add", [mean, epsilon], f"{name}/variance")], f"{name}/root")
        gain = g.weight(f"{name}.weight", self._tensors[f"{name}.weight"])
        return g.node("Mul", [g.node("Div", [x, root], f"{name}/unit"), gain], name)

    def _heads(self, x: str, name: str) -> str:
        split = self._g.node("Reshape", [x, self._shape(0, 0, -1, self._config.head_dim)], f"{name}/split")
        return self._g.node("Transpose", [split], f"{name}/heads", attributes={"perm": [0, 2, 1, 3]})

    def _repeat(self, x: str, name: str) -> str:
        """Each key head once for each query head of its group."""
        g, config = self._g, self._config
        apart = g.node("Unsqueeze", [x, self._shape(2)], f"{name}/apart")
        many = self._shape(1, 1, config.num_heads // config.num_kv_heads, 1, 1)
        repeated = g.node("Expand", [apart, many], f"{name}/repeated")
        return g.node("Reshape", [repeated, self._shape(0, config.num_heads, -1, config.head_dim)], f"{name}/all")

    def _rotate(self, x: str, cos: str, sin: str, name: str) -> str:
        g = self._g
        halves = [f"{name}/first", f"{name}/second"]
        g.node("Split", [x], f"{name}/halves", outputs=halves, attributes={"axis": -1, "num_outputs": 2})
        negative = g.node("Neg", [halves[1]], f"{name}/negative")
        turned = g.node("Concat", [negative, halves[0]], f"{name}/turned", attributes={"axis": -1})
        parts = [g.node("Mul", pair, f"{name}/{i}") for i, pair in enumerate(([x, cos], [turned, sin]))]
        return g.node("Add", parts, f"{name}/rotated")

    def _rotary(self) -> list[str]:
        """Cosines and sines for the positions, `[batch, 1, sequence, head_dim]`."""
        g, config = self._g, self._config
        exponents = np.arange(0, config.head_dim, 2) / config.head_dim
        angles = np.tile(np.outer(np.arange(config.context_length), config.rope_theta**-exponents), 2)
        tables: dict[str, Callable[..., NDArray[np.float64]]] = {"cos": np.cos, "sin": np.sin}
        results = []
        for name, function in tables.items():
            table = g.weight(name, function(angles).astype(np.float32))
            rows = g.node("Gather", [table, "position_ids"], f"/model/rotary_emb/{name}")
            results.append(g.node("Unsqueeze", [rows, self._shape(1)], f"/model/rotary_emb/{name}/heads"))
        return results

    def _mask(self) -> str:
        """0 where a token may look and -1e9 elsewhere, `[batch, 1, sequence, total]`."""
        g = self._g
        shape = g.node("Shape", ["attention_mask"], "/mask/shape", attributes={"start": 1})
        total = g.node("Squeeze", [shape], "/mask/total")
        begin, step = (g.constant(f"int_{i}", np.array(i, dtype=np.int64)) for i in (0, 1))
        keys = g.node("Range", [begin, total, step], "/mask/keys")
        tokens = g.node("Unsqueeze", ["position_ids", self._shape(-1)], "/mask/tokens")
        earlier = g.node("LessOrEqual", [keys, tokens], "/mask/earlier")
        there = g.node("Cast", ["attention_mask"], "/mask/there", attributes={"to": 9})
        there = g.node("Unsqueeze", [there, self._shape(1)], "/mask/rows")
        seen = g.node("And", [earlier, there], "/mask/seen")
        zero, never = (g.constant(f"float_{i}", np.array(i, dtype=np.float32)) for i in (0.0, -1e9))
        return g.node("Unsqueeze", [g.node("Where", [seen, zero, never], "/mask/where"), self._shape(1)], "/mask")

    def _shape(self, *sizes: int) -> str:
        return self._g.constant(f"sizes_{'_'.join(map(str, sizes))}", np.array(sizes, dtype=np.int64))


def portable_package(texts: Package, folder: Path, *, tied: bool = True) -> Package:
    """The tiny model as a portable package, with the text files of another package of it."""
    config, weights = small_model(tie_word_embeddings=tied)
    folder.mkdir(parents=True)
    with GraphBuilder(folder / MODEL_NAME, folder / DATA_NAME) as g:
        PortableGraph(g, config, weights).write()
        g.save("main_graph", {})
    for name in TEXT_FILES:
        shutil.copyfile(texts.folder / name, folder / name)
    if not tied:
        path = folder / "config.json"
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'), encoding="utf-8")
    manifest = replace(
        texts.manifest,
        graph="portable",
        inputs=(*INPUTS, *past_names(config)),
        outputs=("logits", *present_names(config)),
        details={},
    )
    finish_package(folder, manifest)
    return Package.open(folder)
