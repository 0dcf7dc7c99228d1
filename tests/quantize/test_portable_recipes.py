"""Quantizing graphs of other exporters: `dynamic` and `static`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from packages import TOKENS, contents, graph_runner, names, no_progress, package_runner
from portable_graph import portable_package
from typer.testing import CliRunner

from qwenonnx.cli.main import app
from qwenonnx.errors import PackageError, QuantizeError
from qwenonnx.evaluate.gate import GateLimits, GateResult
from qwenonnx.evaluate.metrics import Comparison, compare_logits
from qwenonnx.files import Progress
from qwenonnx.package.package import Package
from qwenonnx.package.writer import ADOPTED, finish_package
from qwenonnx.quantize.calibration_reader import CHUNKS, PastStatesReader
from qwenonnx.quantize.exclusion import excluded
from qwenonnx.quantize.options import QuantizeOptions
from qwenonnx.quantize.portable import write_portable
from qwenonnx.quantize.portable_linears import PortableGraph
from qwenonnx.quantize.quantizer import quantize_package, refused_folder
from qwenonnx.quantize.recipes import RECIPES, PortableRecipe
from qwenonnx.quantize.verdict import ALTERNATIVE, cost
from qwenonnx.runtime.session import SessionConfig, open_session

LINEARS = 14
"""Products with weights in two layers; the tied head's is the embedding, which stays in fp32."""
DYNAMIC, STATIC = (recipe for recipe in RECIPES.values() if isinstance(recipe, PortableRecipe))
TEXT = "The river rises in the mountains and reaches the sea after many days. " * 4


@pytest.fixture(scope="module")
def portable(tiny_fp32: Package, tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The tiny model in standard operators; shared, so tests must not write into its folder."""
    return portable_package(tiny_fp32, tmp_path_factory.mktemp("portable") / "fp32")


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def quantize(source: Package, target: Path, recipe: str = "dynamic", **options: Any) -> Package:
    return quantize_package(source, target, recipe, stage=no_progress, options=QuantizeOptions(**options))


def graph_of(package: Package) -> Any:
    return onnx.load(str(package.model_path), load_external_data=False).graph


def operators(package: Package) -> Counter[str]:
    return Counter(node.op_type for node in graph_of(package).node)


def weights_of(package: Package) -> dict[str, Any]:
    """The int8 matrices of a package."""
    stored = onnx.load(str(package.model_path)).graph.initializer
    return {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in stored
        if tensor.data_type == TensorProto.INT8 and len(tensor.dims) == 2
    }


def test_dynamic_changes_products_with_weights_and_nothing_else(portable: Package, tmp_path: Path) -> None:
    before = contents(portable.folder)

    result = quantize(portable, tmp_path / "dynamic")

    assert operators(result)["MatMulInteger"] == LINEARS
    assert operators(result)["MatMul"] == 5  # two of attention in each layer, and the head
    assert operators(result)["Softmax"] == operators(portable)["Softmax"]
    assert operators(result)["Sqrt"] == operators(portable)["Sqrt"]
    embedding = next(tensor for tensor in graph_of(result).initializer if tensor.name == "model.embed_tokens.weight")
    assert embedding.data_type == TensorProto.FLOAT
    assert [value.name for value in graph_of(result).input] == list(portable.manifest.inputs)
    assert contents(portable.folder) == before
    assert names(tmp_path) == ["dynamic"]
    assert names(result.folder) == names(portable.folder)


def test_the_manifest_says_what_was_done_and_how_it_was_judged(portable: Package, tmp_path: Path) -> None:
    manifest = quantize(portable, tmp_path / "out", reduce_range=True).manifest

    assert (manifest.recipe, manifest.graph) == ("dynamic", "portable")
    assert manifest.inputs == portable.manifest.inputs
    assert manifest.data_files == ("model.onnx.data",)
    quantization = manifest.details["quantization"]
    assert (quantization["per_channel"], quantization["reduce_range"]) == (True, True)
    gate = manifest.details["gate"]
    assert gate["passed"] is True
    assert 0 < gate["kl_mean"] < 2
    assert gate["limits"] == {"kl_mean": 2.0, "top1_agreement": 0.25}


def test_per_channel_scales_are_one_for_each_output_and_nearer(portable: Package, tmp_path: Path) -> None:
    channel = quantize(portable, tmp_path / "channel", per_channel=True)
    tensor = quantize(portable, tmp_path / "tensor", per_channel=False)

    scales = {
        name: [t for t in graph_of(package).initializer if t.name.endswith("down_proj_scale") and len(t.dims) <= 1]
        for name, package in (("channel", channel), ("tensor", tensor))
    }
    assert {tuple(t.dims) for t in scales["channel"]} == {(64,)}
    assert {tuple(t.dims) for t in scales["tensor"]} <= {(), (1,)}
    kl = [package.manifest.details["gate"]["kl_mean"] for package in (channel, tensor)]
    assert kl[0] < kl[1]


def test_a_reduced_range_leaves_weights_seven_bits(portable: Package, tmp_path: Path) -> None:
    full = weights_of(quantize(portable, tmp_path / "full"))
    reduced = weights_of(quantize(portable, tmp_path / "reduced", reduce_range=True))

    assert len(full) == len(reduced) == LINEARS
    assert max(np.abs(matrix.astype(int)).max() for matrix in full.values()) > 120
    assert max(np.abs(matrix.astype(int)).max() for matrix in reduced.values()) <= 64


def test_an_untied_head_is_quantized_too(tiny_fp32: Package, tmp_path: Path) -> None:
    source = portable_package(tiny_fp32, tmp_path / "fp32", tied=False)

    whole = quantize(source, tmp_path / "whole")
    without = quantize(source, tmp_path / "without", exclude=("lm_head",))

    assert operators(whole)["MatMulInteger"] == LINEARS + 1
    assert operators(without)["MatMulInteger"] == LINEARS


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("*.down_proj", 2),
        ("model.layers.0.*", 7),
        ("/model/layers.1/mlp/up_proj/MatMul", 1),
        ("*.self_attn.[qkv]_proj", 6),
    ],
)
@pytest.mark.parametrize("recipe", ["dynamic", "static"])
def test_excluded_nodes_stay_in_fp32(
    recipe: str, pattern: str, count: int, portable: Package, calibration: Path, tmp_path: Path
) -> None:
    texts = (calibration,) if recipe == "static" else ()

    result = quantize(portable, tmp_path / "out", recipe, exclude=(pattern,), calibration=texts)

    assert len(weights_of(result)) == LINEARS - count
    assert result.manifest.details["quantization"]["exclude"] == [pattern]


def test_a_pattern_that_matches_nothing_is_refused_with_names_of_the_graph(portable: Package, tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match=r"--exclude lm_head: no linear .*model\.layers\.1\.mlp\.down_proj"):
        quantize(portable, tmp_path / "out", exclude=("lm_head",))  # tied: it is the embedding
    assert not list(tmp_path.iterdir())


def test_static_fixes_the_scales_of_the_inputs_of_linears(portable: Package, calibration: Path, tmp_path: Path) -> None:
    before = contents(portable.folder)

    result = quantize(portable, tmp_path / "static", "static", calibration=(calibration,))

    found = operators(result)
    assert found["QuantizeLinear"] > 0
    assert found["Softmax"] == 2
    assert len(weights_of(result)) == LINEARS
    quantized = {node.input[0] for node in graph_of(result).node if node.op_type == "QuantizeLinear"}
    assert not [name for name in quantized if "softmax" in name or "self_attn/q/" in name]
    assert result.manifest.details["gate"]["kl_mean"] < 0.1
    assert result.manifest.details["quantization"]["calibrate"] is True
    assert contents(portable.folder) == before
    assert names(tmp_path) == ["calibration.txt", "static"]


def test_static_depends_on_its_texts(portable: Package, calibration: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("0 1 2 3 4 5 6 7 8 9 " * 10, encoding="utf-8")

    first = quantize(portable, tmp_path / "a", "static", calibration=(calibration,), gate=False)
    second = quantize(portable, tmp_path / "b", "static", calibration=(other,), gate=False)

    assert first.model_path.read_bytes() != second.model_path.read_bytes()


@pytest.mark.parametrize("recipe", ["dynamic", "static"])
def test_quantizing_twice_gives_the_same_bytes(
    recipe: str, portable: Package, calibration: Path, tmp_path: Path
) -> None:
    texts = (calibration,) if recipe == "static" else ()
    first, second = (quantize(portable, tmp_path / name, recipe, calibration=texts) for name in "ab")

    assert contents(first.folder) == contents(second.folder)


def test_temporary_files_are_beside_the_result_and_gone_after(
    portable: Package, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "tmp"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    monkeypatch.chdir(elsewhere)
    made: list[str] = []
    really = tempfile.mkdtemp

    def mkdtemp(*args: Any, **kwargs: Any) -> str:
        made.append(really(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    for recipe in ("dynamic", "static"):
        texts = (calibration,) if recipe == "static" else ()
        quantize(portable, tmp_path / "results" / recipe, recipe, calibration=texts)

    assert made
    assert all(Path(path).is_relative_to(tmp_path / "results") for path in made)
    assert not any(Path(path).exists() for path in made)
    assert tempfile.tempdir == str(elsewhere)
    assert names(elsewhere) == []
    assert names(tmp_path / "results") == ["dynamic", "static"]


def test_the_reader_feeds_the_states_that_the_model_itself_computes(portable: Package) -> None:
    session = open_session(portable.model_path, SessionConfig(threads=1))
    ids = [[*range(5, 100)], [1, 2, 3]]
    seen: list[int] = []

    reader = PastStatesReader(portable, session, ids, lambda done, total: seen.append(done))
    steps = []
    while (feeds := reader.get_next()) is not None:
        steps.append(feeds)

    assert [step["input_ids"].shape[1] for step in steps] == [*CHUNKS, 3]
    assert seen == [1, 2]
    whole = session.run(["present.1.key"], {**steps[0], **prompt(ids[0][: sum(CHUNKS) - 1])})[0]
    last = steps[len(CHUNKS) - 1]
    np.testing.assert_allclose(last["past_key_values.1.key"], whole, atol=1e-4)
    assert last["attention_mask"].shape == (1, sum(CHUNKS))
    assert last["position_ids"].tolist() == [[sum(CHUNKS) - 1]]
    assert steps[-1]["past_key_values.0.key"].shape[2] == 0


def prompt(ids: list[int]) -> dict[str, Any]:
    """A whole text at once."""
    count = len(ids)
    return {
        "input_ids": np.array([ids], dtype=np.int64),
        "attention_mask": np.ones((1, count), dtype=np.int64),
        "position_ids": np.arange(count, dtype=np.int64)[None],
    }


def test_a_harmed_model_is_written_with_its_cost_and_an_alternative(portable: Package, tmp_path: Path) -> None:
    recipe = DYNAMIC
    measured = Comparison(
        positions=100, predicted=100, agreeing=70, kl=42.0, reference_nll=269, candidate_nll=307, uniform=-1000
    )

    text = cost(recipe, GateResult(recipe.limits, measured, None)) or ""

    assert "another one at 30% of the positions, mean KL 0.420, perplexity 21.54 against 14.73" in text
    assert ALTERNATIVE in text
    assert "--exclude '*.down_proj'" in text
    assert "--exclude" not in (cost(recipe, GateResult(recipe.limits, measured, None), ["*.o_proj"]) or "")
    assert cost(RECIPES["int8"], GateResult(recipe.limits, measured, None)) is None
    faithful = replace(measured, agreeing=99, kl=0.1)
    assert cost(recipe, GateResult(recipe.limits, faithful, None)) is None


def test_the_warning_is_said_and_kept(portable: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strict = replace(DYNAMIC, warning=GateLimits(kl_mean=1e-9, top1_agreement=1))
    monkeypatch.setattr("qwenonnx.quantize.options.RECIPES", {**RECIPES, "dynamic": strict})

    for quiet in ((), ("-q",)):
        command = ["quantize", str(portable.folder), "-o", str(tmp_path / "out"), "--recipe", "dynamic", *quiet]
        result = CliRunner().invoke(app, command)

        assert result.exit_code == 0, result.output
        assert result.stdout == f"{tmp_path / 'out'}\n"
        warning = Package.open(tmp_path / "out").manifest.details["gate"]["warning"]
        assert f"WARNING: {warning}" in result.stderr.splitlines()
        assert "quantize_dynamic" not in result.stderr
        assert "pre-processing" not in result.stderr


def test_a_broken_model_is_refused_with_an_alternative(
    portable: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = replace(DYNAMIC, limits=GateLimits(kl_mean=1e-9, top1_agreement=0))
    monkeypatch.setattr("qwenonnx.quantize.options.RECIPES", {**RECIPES, "dynamic": strict})

    with pytest.raises(QuantizeError, match=r"refused because its mean KL .* writes it all the same \(the package"):
        quantize(portable, tmp_path / "out")
    assert names(tmp_path) == ["out.refused"]
    assert Package.open(refused_folder(tmp_path / "out")).manifest.details["gate"]["passed"] is False


def test_recipes_of_the_fused_graph_are_refused_with_the_remedy(portable: Package, tmp_path: Path) -> None:
    for recipe in ("int8", "int8-block", "int4"):
        with pytest.raises(
            QuantizeError, match=r"needs the fused graph, and this one is portable; export .* or choose .* dynamic, st"
        ):
            quantize(portable, tmp_path / "out", recipe)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"block_size": 32}, "the recipe dynamic has no blocks"),
        ({"calibration": (Path("text"),)}, "the recipe dynamic uses no calibration texts"),
    ],
)
def test_options_for_other_recipes_are_refused(
    options: dict[str, Any], sentence: str, portable: Package, tmp_path: Path
) -> None:
    with pytest.raises(QuantizeError, match=sentence):
        quantize(portable, tmp_path / "out", **options)


def test_a_quantized_portable_package_is_refused(portable: Package, tmp_path: Path) -> None:
    result = quantize(portable, tmp_path / "out")

    with pytest.raises(QuantizeError, match=r"already quantized \(recipe dynamic\)"):
        quantize(result, tmp_path / "again")


def test_an_adopted_package_gives_one_of_this_programs_own(portable: Package, tmp_path: Path) -> None:
    folder = shutil.copytree(portable.folder, tmp_path / "theirs")
    manifest = portable.manifest
    moved = folder / "onnx"
    moved.mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        (folder / name).rename(moved / name)
    (folder / "README.md").write_text("not listed", encoding="utf-8")
    listed = ["onnx/model.onnx", "onnx/model.onnx.data", *(n for n in manifest.files if not n.startswith("model"))]
    adopted = replace(
        manifest, model_file=listed[0], data_files=(listed[1],), details={ADOPTED: {"files": 3}, "kept": 1}
    )
    finish_package(folder, adopted, listed)
    before = contents(folder)

    result = quantize(Package.open(folder), tmp_path / "ours")

    assert result.model_path == tmp_path / "ours" / "model.onnx"
    assert ADOPTED not in result.manifest.details
    assert result.manifest.details["kept"] == 1
    assert names(result.folder) == names(portable.folder)
    assert contents(folder) == before


def altered(portable: Package, folder: Path, change: Any) -> Package:
    """A copy of the package with a changed graph."""
    shutil.copytree(portable.folder, folder)
    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    change(model)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    finish_package(folder, portable.manifest)
    return Package.open(folder)


def test_half_precision_weights_are_refused(portable: Package, tmp_path: Path) -> None:
    def halve(model: Any) -> None:
        for tensor in model.graph.initializer:
            if tensor.name.endswith("o_proj"):
                tensor.CopyFrom(numpy_helper.from_array(np.zeros(tensor.dims, dtype=np.float16), tensor.name))

    changed = altered(portable, tmp_path / "fp16", halve)

    with pytest.raises(QuantizeError, match=r"its weights are fp16, and this recipe needs fp32"):
        quantize(changed, tmp_path / "out")


@pytest.mark.parametrize("location", ["../elsewhere.data", "/etc/hostname"])
def test_weights_outside_the_folder_are_refused(location: str, portable: Package, tmp_path: Path) -> None:
    def move(model: Any) -> None:
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = location

    with pytest.raises(PackageError, match=f"it has weights in {location}, outside its folder"):
        quantize(altered(portable, tmp_path / "moved", move), tmp_path / "out")
    assert names(tmp_path) == ["moved"]


def test_a_graph_without_linears_is_refused(portable: Package, tmp_path: Path) -> None:
    def empty(model: Any) -> None:
        del model.graph.node[1:]

    with pytest.raises(QuantizeError, match="no MatMul or Gemm with fp32 weights in it"):
        quantize(altered(portable, tmp_path / "empty", empty), tmp_path / "out")


def test_nodes_without_names_get_some(portable: Package, tmp_path: Path) -> None:
    def unname(model: Any) -> None:
        for node in model.graph.node:
            node.name = ""

    changed = altered(portable, tmp_path / "nameless", unname)
    linears = PortableGraph.read(changed.model_path).linears

    result = quantize(changed, tmp_path / "out", exclude=(linears[0].name,))

    assert len({linear.name for linear in linears}) == LINEARS
    assert operators(result)["MatMulInteger"] == LINEARS - 1


def with_gemm(portable: Package, folder: Path, **attributes: float) -> Package:
    """The package with a Gemm in the place of one MatMul."""

    def change(model: Any) -> None:
        graph = model.graph
        index = next(i for i, node in enumerate(graph.node) if node.name.endswith("layers.1/mlp/down_proj/MatMul"))
        node = graph.node[index]
        graph.initializer.append(helper.make_tensor("flat", TensorProto.INT64, [2], [-1, 128]))
        graph.initializer.append(helper.make_tensor("back", TensorProto.INT64, [3], [1, -1, 64]))
        name = "/model/layers.1/mlp/down_proj/Gemm"
        nodes = [
            helper.make_node("Reshape", [node.input[0], "flat"], ["flat_x"], name="to_rows"),
            helper.make_node("Gemm", ["flat_x", node.input[1]], ["flat_y"], name=name, **attributes),
            helper.make_node("Reshape", ["flat_y", "back"], [node.output[0]], name="from_rows"),
        ]
        graph.node.remove(node)
        for offset, new in enumerate(nodes):
            graph.node.insert(index + offset, new)

    return altered(portable, folder, change)


def test_a_gemm_is_quantized_and_excluded_like_a_matmul(portable: Package, tmp_path: Path) -> None:
    source = with_gemm(portable, tmp_path / "gemm")

    whole = quantize(source, tmp_path / "whole")
    without = quantize(source, tmp_path / "without", exclude=("*.down_proj",))

    assert operators(whole)["MatMulInteger"] == LINEARS
    assert operators(without)["MatMulInteger"] == LINEARS - 2


def test_a_graph_with_onnxruntimes_own_operators_is_quantized(tiny_fp32: Package, tmp_path: Path) -> None:
    graph = PortableGraph.read(tiny_fp32.model_path)
    kept = excluded(graph.linears, ["*.o_proj"])

    write_portable(tiny_fp32, tmp_path, graph, DYNAMIC, kept, (), no_progress)

    written = onnx.load(str(tmp_path / "model.onnx"), load_external_data=False).graph
    counts = Counter(node.op_type for node in written.node)
    assert (counts["If"], counts["MatMulInteger"], counts["MatMul"]) == (2, 9, 2)
    logits = graph_runner(tmp_path / "model.onnx", tiny_fp32.config).score(TOKENS, 0)
    expected = package_runner(tiny_fp32).score(TOKENS, 0)
    assert 0 < compare_logits(expected, logits, np.asarray(TOKENS[1:])).kl_mean < 0.1


def test_a_linear_that_the_quantizer_passes_over_is_an_error_until_it_is_excluded(
    portable: Package, tmp_path: Path
) -> None:
    source = with_gemm(portable, tmp_path / "gemm", alpha=0.5)  # a factor is what the quantizer cannot take

    with pytest.raises(QuantizeError, match=r"left 1 linears in fp32, such as /model/layers\.1/mlp/down_proj/Gemm"):
        quantize(source, tmp_path / "out")
    result = quantize(source, tmp_path / "out", exclude=("model.layers.1.mlp.down_proj",))

    assert operators(result)["MatMulInteger"] == LINEARS - 1
    assert names(tmp_path) == ["gemm", "out"]


def test_too_little_room_is_found_before_anything_is_written(
    portable: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: dict[str, int] = {}

    def require_space(folder: Path, count: int) -> None:
        needed[folder.name] = count
        raise QuantizeError("stop")

    monkeypatch.setattr("qwenonnx.quantize.quantizer.require_space", require_space)
    for recipe in ("dynamic", "static"):
        with pytest.raises(QuantizeError, match="stop"):
            quantize(portable, tmp_path / recipe, recipe)

    source = portable.model_path.stat().st_size + portable.data_paths[0].stat().st_size
    assert source < needed["dynamic"] < needed["static"]
    assert not list(tmp_path.iterdir())


def test_the_quantizer_is_imported_only_once_onnxruntimes_telemetry_is_off(portable: Package, tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
import qwenonnx.quantize.quantizer as quantizer
from qwenonnx.package.package import Package
assert "onnxruntime" not in sys.modules
class Watcher:
    def find_spec(self, name, path=None, target=None):
        if name == "onnxruntime":
            print(os.environ.get("ORT_DISABLE_TELEMETRY"))
sys.meta_path.insert(0, Watcher())
stage = lambda label: lambda done, total: None
quantizer.quantize_package(Package.open(Path(sys.argv[1])), Path(sys.argv[2]), "dynamic", stage=stage)
"""
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    command = [sys.executable, "-c", script, str(portable.folder), str(tmp_path / "out")]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)

    assert (done.stdout, done.stderr) == ("1\n", "")


def test_progress_of_calibration_is_reported(portable: Package, calibration: Path, tmp_path: Path) -> None:
    stages: list[str] = []

    def stage(label: str) -> Progress:
        stages.append(label)
        return lambda done, total: None

    options = QuantizeOptions(calibration=(calibration,))
    quantize_package(portable, tmp_path / "out", "static", stage=stage, options=options)

    assert "calibrating and quantizing" in stages
