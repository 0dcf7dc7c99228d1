"""Which linears stay in fp32: patterns, and the names that they are matched with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from qwenonnx.config import ModelConfig
from qwenonnx.errors import QuantizeError

EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear, embedding or head of a graph: its name there, other names that it goes by, and its weights."""

    name: str
    aliases: tuple[str, ...]
    weights: int


def fused_linears(config: ModelConfig) -> list[Linear]:
    """All linears of a fused graph, in its order; tied, embedding and head are one."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    matrix = config.vocab_size * hidden
    if config.tie_word_embeddings:
        linears = [Linear("model.embed_tokens", ("lm_head",), matrix)]
    else:
        linears = [Linear("model.embed_tokens", (), matrix), Linear("lm_head", (), matrix)]
    for i in range(config.num_layers):
        attention, block = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        parts = tuple(f"{attention}.{kind}_proj" for kind in "qkv")
        linears += [
            Linear(f"{attention}.qkv_proj", parts, hidden * (config.q_size + 2 * config.kv_size)),
            Linear(f"{attention}.o_proj", (), config.q_size * hidden),
            Linear(f"{block}.gate_proj", (), hidden * mlp),
            Linear(f"{block}.up_proj", (), hidden * mlp),
            Linear(f"{block}.down_proj", (), mlp * hidden),
        ]
    return linears


def excluded(linears: Sequence[Linear], patterns: Iterable[str]) -> list[Linear]:
    """The linears of which a name matches one of the patterns (with `*`, `?` and `[]`).

    The linears that a checkpoint keeps apart and a graph joins (queries, keys, values) are excluded together.

    Raises:
        QuantizeError: a pattern matches nothing.
    """
    found: dict[str, Linear] = {}
    for pattern in patterns:
        wanted = pattern.removesuffix(".weight")
        matching = [
            linear for linear in linears if any(fnmatchcase(name, wanted) for name in (linear.name, *linear.aliases))
        ]
        if not matching:
            raise QuantizeError(
                f"--exclude {pattern}: no linear has such a name; there are {_examples(linears)}, and patterns such as "
                "'*.down_proj' match several."
            )
        found.update((linear.name, linear) for linear in matching)
    return list(found.values())


def _examples(linears: Sequence[Linear]) -> str:
    names = [name for linear in linears for name in (linear.name, *linear.aliases)]
    chosen = [names[0], names[-1]] if len(names) <= EXAMPLES else [names[0], names[len(names) // 2], names[-1]]
    return ", ".join(dict.fromkeys(chosen))
