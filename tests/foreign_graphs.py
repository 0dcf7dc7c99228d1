"""Graphs of the tiny model as other programs have them: variants of the portable one, and one in the style of genai."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper
from packages import small_model
from portable_graph import PortableGraph

from qwenonnx.graph.builder import GraphBuilder
from qwenonnx.graph.names import STEP_INPUTS
from qwenonnx.package.manifest import DATA_NAME, MODEL_NAME
from qwenonnx.package.package import Package

Change = Callable[[Any], None]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def portable_model(folder: Path, **overrides: Any) -> Any:
    """The portable graph of the tiny model with its weights in memory; `overrides` are fields of its config.json."""
    config, weights = small_model(**overrides)
    folder.mkdir(parents=True)
    with GraphBuilder(folder / MODEL_NAME, folder / DATA_NAME) as g:
        PortableGraph(g, config, weights).write()
        g.save("main_graph", {})
    model = onnx.load(str(folder / MODEL_NAME))
    shutil.rmtree(folder)
    return model


def genai_model(package: Package) -> Any:
    """The fused graph of a package with the inputs and outputs of onnxruntime-genai's builder, weights in memory."""
    model = onnx.load(str(package.model_path))
    _attend_in_batches(model)
    for name in STEP_INPUTS[1:]:
        model.graph.input.remove(_named(model.graph.input, name))
    model.graph.input.append(
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"])
    )
    one, zero, axis = (_constant(model, f"genai_{name}", value) for name, value in (("1", 1), ("0", 0), ("axis", [1])))
    nodes = [
        helper.make_node("ReduceSum", ["attention_mask", axis], ["mask_sums"], keepdims=0),
        helper.make_node("Sub", ["mask_sums", one], ["mask_last"]),
        helper.make_node("Cast", ["mask_last"], ["seqlens_k"], to=TensorProto.INT32),
        helper.make_node("Shape", ["attention_mask"], ["mask_length"], start=1),
        helper.make_node("Cast", ["mask_length"], ["total_sequence_length"], to=TensorProto.INT32),
        helper.make_node("Size", ["input_ids"], ["tokens"]),
        helper.make_node("Range", [zero, "tokens", one], ["logits_rows"]),
    ]
    _prepend(model, nodes)
    _rename_output(model, "logits", "row_logits")
    model.graph.node.extend(_reshaped_like_ids(model, "row_logits"))
    _named(model.graph.output, "logits").CopyFrom(
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch_size", "sequence_length", 512])
    )
    return model


def _attend_in_batches(model: Any) -> None:
    """Attention as the operator itself has it: a batch of rows with a sequence each."""
    nodes = list(model.graph.node)
    for at, node in enumerate(nodes):
        if node.op_type != "If":
            continue
        vectors, tokens = nodes[at - 1], nodes[at + 1]
        layer = node.name.split(".")[2]
        past = [f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
        nodes[at] = helper.make_node(
            "GroupQueryAttention",
            [vectors.input[0], "", "", *past, "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache"],
            [tokens.output[0], *node.output[1:]],
            name=node.name,
            domain="com.microsoft",
            num_heads=4,
            kv_num_heads=2,
            do_rotary=1,
        )
        vectors.op_type = tokens.op_type = "unused"
    del model.graph.node[:]
    model.graph.node.extend(node for node in nodes if node.op_type != "unused")
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"])
    _named(model.graph.input, "input_ids").CopyFrom(ids)


def genai_config(**changes: Any) -> dict[str, Any]:
    """The genai_config.json of the tiny model; `changes` replace entries of its section `model`."""
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": "model.onnx",
        "head_size": 16,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
    }
    model = {"context_length": 2048, "decoder": decoder, "eos_token_id": 2, "type": "qwen2", "vocab_size": 512}
    return {"model": {**model, **changes}, "search": {"do_sample": True, "temperature": 0.7, "top_k": 3, "top_p": 0.9}}


def save(model: Any, path: Path, data: str | None = None) -> Path:
    """Saves a model, with its weights in the file `data` beside it if that is given; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(path), save_as_external_data=data is not None, location=data, size_threshold=1024)
    return path


def copy_texts(package: Package, folder: Path, names: Sequence[str] = ("config.json", *TOKENIZER_FILES)) -> None:
    """Copies files that are neither graph nor weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(package.folder / name, folder / name)


def genai_folder(package: Package, folder: Path, **changes: Any) -> Path:
    """A folder as onnxruntime-genai's builder leaves it: no config.json."""
    copy_texts(package, folder, TOKENIZER_FILES)
    save(genai_model(package), folder / "model.onnx", "model.onnx.data")
    (folder / "genai_config.json").write_text(json.dumps(genai_config(**changes)), encoding="utf-8")
    return folder


def without_positions(model: Any) -> None:
    """Positions are counted from the mask, as older exports have it."""
    model.graph.input.remove(_named(model.graph.input, "position_ids"))
    one, axis, far = (
        _constant(model, f"positions_{name}", value) for name, value in (("1", 1), ("axis", [1]), ("far", [1 << 40]))
    )
    nodes = [
        helper.make_node("CumSum", ["attention_mask", one], ["counted"]),
        helper.make_node("Sub", ["counted", one], ["positions"]),
        helper.make_node("Shape", ["input_ids"], ["length"], start=1),
        helper.make_node("Neg", ["length"], ["from_the_end"]),
        helper.make_node("Slice", ["positions", "from_the_end", far, axis], ["position_ids"]),
    ]
    _prepend(model, nodes)


def in_half_precision(model: Any) -> None:
    """Weights, cache and logits in fp16."""
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            with np.errstate(over="ignore"):  # minus infinity in a mask does as well
                half = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16


def with_last_logits_only(model: Any) -> None:
    """Logits of the last token alone."""
    _slice_logits(model, _constant(model, "last", [-1]))


def with_chosen_logits(model: Any) -> None:
    """As many logits as `num_logits_to_keep` asks for, counted from the end."""
    model.graph.input.append(helper.make_tensor_value_info("num_logits_to_keep", TensorProto.INT64, []))
    axis = _constant(model, "keep_axis", [0])
    _prepend(
        model,
        [
            helper.make_node("Neg", ["num_logits_to_keep"], ["minus_kept"]),
            helper.make_node("Unsqueeze", ["minus_kept", axis], ["first_kept"]),
        ],
    )
    _slice_logits(model, "first_kept")


def with_a_cache_branch(model: Any) -> None:
    """A merged decoder: the past of layer 0 only counts where `use_cache_branch` says so."""
    model.graph.input.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))
    zero, axis = _constant(model, "branch_zero", [0]), _constant(model, "branch_axis", [2])
    for kind in ("key", "value"):
        past, chosen = f"past_key_values.0.{kind}", f"chosen.{kind}"
        for node in model.graph.node:
            node.input[:] = [chosen if name == past else name for name in node.input]
        branches = [
            helper.make_graph(
                [node], f"{kind}_{name}", [], [helper.make_tensor_value_info(f"{kind}_{name}", TensorProto.FLOAT, None)]
            )
            for name, node in (
                ("with_past", helper.make_node("Identity", [past], [f"{kind}_with_past"])),
                ("without", helper.make_node("Slice", [past, zero, zero, axis], [f"{kind}_without"])),
            )
        ]
        _prepend(
            model,
            [helper.make_node("If", ["use_cache_branch"], [chosen], then_branch=branches[0], else_branch=branches[1])],
        )


def renamed(pattern: Callable[[str], str]) -> Change:
    """Cache tensors under other names."""

    def change(model: Any) -> None:
        names = {
            value.name: pattern(value.name)
            for value in (*model.graph.input, *model.graph.output)
            if "key" in value.name or "value" in value.name
        }
        for value in (*model.graph.input, *model.graph.output):
            value.name = names.get(value.name, value.name)
        for node in model.graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]

    return change


def with_fixed_axis(name: str, axis: int, size: int) -> Change:
    """One axis of an input is a number."""

    def change(model: Any) -> None:
        dimension = _named(model.graph.input, name).type.tensor_type.shape.dim[axis]
        dimension.Clear()
        dimension.dim_value = size

    return change


def with_one_row(model: Any) -> None:
    """A batch of one, for all inputs."""
    for value in model.graph.input:
        with_fixed_axis(value.name, 0, 1)(model)


def without_past(name: str) -> Change:
    """A past that is always empty, and no input."""

    def change(model: Any) -> None:
        model.graph.input.remove(_named(model.graph.input, name))
        empty = np.zeros((1, 2, 0, 16), dtype=np.float32)
        model.graph.initializer.append(numpy_helper.from_array(empty, name))

    return change


def with_forgotten_values(model: Any) -> None:
    """The values of the past count as zero, and nothing but using the cache shows it."""
    zero = numpy_helper.from_array(np.zeros(1, dtype=np.float32), "forgotten_zero")
    model.graph.initializer.append(zero)
    for layer in (0, 1):
        past, forgotten = f"past_key_values.{layer}.value", f"forgotten.{layer}"
        for node in model.graph.node:
            node.input[:] = [forgotten if name == past else name for name in node.input]
        _prepend(model, [helper.make_node("Mul", [past, zero.name], [forgotten])])


def with_input(name: str) -> Change:
    """An input that nobody knows."""

    def change(model: Any) -> None:
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]))

    return change


def with_open_vocabulary(model: Any) -> None:
    """The width of the logits cannot be told before a run."""
    _rename_output(model, "logits", "all_logits")
    model.graph.node.extend(_reshaped_like_ids(model, "all_logits"))
    dimension = _named(model.graph.output, "logits").type.tensor_type.shape.dim[2]
    dimension.Clear()
    dimension.dim_param = "vocab"


def with_weights(name: str, value: float) -> Change:
    """All values of one tensor are the same number."""

    def change(model: Any) -> None:
        tensor = _named(model.graph.initializer, name)
        array = np.full_like(numpy_helper.to_array(tensor), value)
        tensor.CopyFrom(numpy_helper.from_array(array, name))

    return change


def _reshaped_like_ids(model: Any, rows: str) -> list[NodeProto]:
    width = _constant(model, "logits_width", [-1])
    return [
        helper.make_node("Shape", ["input_ids"], ["ids_shape"]),
        helper.make_node("Concat", ["ids_shape", width], ["logits_shape"], axis=0),
        helper.make_node("Reshape", [rows, "logits_shape"], ["logits"]),
    ]


def _slice_logits(model: Any, first: str) -> None:
    _rename_output(model, "logits", "all_logits")
    far, axis = _constant(model, "logits_far", [1 << 40]), _constant(model, "logits_axis", [1])
    model.graph.node.append(helper.make_node("Slice", ["all_logits", first, far, axis], ["logits"]))
    dimension = _named(model.graph.output, "logits").type.tensor_type.shape.dim[1]
    dimension.Clear()
    dimension.dim_param = "kept"


def _named(values: Sequence[Any], name: str) -> Any:
    return next(value for value in values if value.name == name)


def _constant(model: Any, name: str, value: int | Sequence[int]) -> str:
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype=np.int64), name))
    return name


def _prepend(model: Any, nodes: Sequence[NodeProto]) -> None:
    rest = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *rest])


def _rename_output(model: Any, name: str, new: str) -> None:
    for node in model.graph.node:
        node.output[:] = [new if output == name else output for output in node.output]
