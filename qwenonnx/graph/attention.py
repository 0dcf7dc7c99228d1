"""Attention over a ragged batch, such that a token's result has the same bits however its step is made up.

Tokens of all rows lie behind each other, `[1, tokens, features]`; only attention sees a batch. `head_rows` says which
head vectors (of `[tokens * (heads + 2 * kv_heads), head_dim]`) make up its input, `output_rows` which vectors of its
output belong to each token; `runtime.attention_inputs` makes them. Two forms, chosen by `lone_tokens`:

* Chunks: `GroupQueryAttention` with the number of valid tokens of each row in `query_seqlens`, and one token more.
* One token in every row: the query heads that share a key head are given as so many tokens of that one head, so that
  the keys are read once for all of them. `position_ids` and `attention_bias` say that they are at the same place.

In both, every product has two query rows or more. onnxruntime has another kernel for a lone row, whose sums are in
another order, and rounding to int8 would make a difference of its last bits as large as its own noise.
"""

from __future__ import annotations

import numpy as np

from qwenonnx.config import ModelConfig
from qwenonnx.graph.builder import GraphBuilder

MS = "com.microsoft"


def declare_attention_inputs(g: GraphBuilder, config: ModelConfig) -> None:
    """Declares the inputs that attention reads beside the cache, and the shapes that it needs."""
    g.input("seqlens_k", np.int32, ("batch",))
    g.input("query_seqlens", np.int32, ("batch",))
    g.input("total_sequence_length", np.int32, (1,))
    g.input("lone_tokens", np.bool_, (1,))
    g.input("head_rows", np.int64, ("batch", "padded", "vectors"))
    g.input("output_rows", np.int64, ("tokens", config.num_heads))
    g.input("position_ids", np.int64, ("batch", "padded_or_one"))
    g.input("attention_bias", np.float32, ("batch_or_one", 1, "padded_or_one", "total_or_one"))
    kv, vectors = config.num_kv_heads, config.num_heads + 2 * config.num_kv_heads
    g.constant("head_vectors", np.array([-1, config.head_dim], dtype=np.int64))
    g.constant("lone_input", np.array([0, 0, 3 * kv * config.head_dim], dtype=np.int64))
    g.constant("chunk_input", np.array([0, 0, vectors * config.head_dim], dtype=np.int64))
    g.constant("attention_output", np.array([1, -1, config.q_size], dtype=np.int64))


def write_attention(g: GraphBuilder, config: ModelConfig, i: int, qkv: str, name: str) -> str:
    """Attention of layer `i` over `qkv` [1, tokens, features]; returns [1, tokens, heads * head_dim]."""
    vectors = g.node("Reshape", [qkv, "head_vectors"], f"{name}/vectors")
    results = [f"{name}/heads", f"present.{i}.key", f"present.{i}.value"]
    branches = {
        "then_branch": _form(g, config, i, vectors, f"{name}/lone", lone=True),
        "else_branch": _form(g, config, i, vectors, f"{name}/chunks", lone=False),
    }
    g.node("If", ["lone_tokens"], name, outputs=results, attributes=branches)
    return g.node("Reshape", [results[0], "attention_output"], f"{name}/tokens")


def _form(g: GraphBuilder, config: ModelConfig, i: int, vectors: str, name: str, *, lone: bool) -> object:
    with g.subgraph(name) as branch:
        picked = g.node("Gather", [vectors, "head_rows"], f"{name}/picked", attributes={"axis": 0})
        batch = g.node("Reshape", [picked, "lone_input" if lone else "chunk_input"], f"{name}/batch")
        past = [f"past_key_values.{i}.key", f"past_key_values.{i}.value"]
        lengths = ["seqlens_k", "total_sequence_length", "cos_cache", "sin_cache"]
        places = ["position_ids", "attention_bias"] if lone else ["", ""]
        outputs = [f"{name}/attended", f"{name}/key", f"{name}/value"]
        heads = config.num_kv_heads if lone else config.num_heads
        g.node(
            "GroupQueryAttention",
            [batch, "", "", *past, *lengths, *places, "", "", "", "", "", "query_seqlens"],
            name,
            outputs=outputs,
            domain=MS,
            attributes={"num_heads": heads, "kv_num_heads": config.num_kv_heads, "do_rotary": 1},
        )
        attended = g.node("Reshape", [outputs[0], "head_vectors"], f"{name}/attended_vectors")
        result = g.node("Gather", [attended, "output_rows"], f"{name}/result", attributes={"axis": 0})
        branch.outputs(np.float32, [result, *outputs[1:]])
    return branch.graph
