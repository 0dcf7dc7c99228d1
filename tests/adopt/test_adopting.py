"""Folders of other programs become packages: what is taken, what is checked, what is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from foreign_graphs import (
    Change,
    copy_texts,
    genai_config,
    genai_folder,
    in_half_precision,
    portable_model,
    renamed,
    save,
    with_fixed_axis,
    with_forgotten_values,
    with_input,
    with_weights,
    without_past,
)
from onnxruntime.quantization import QuantType, quantize_dynamic
from packages import ONE_THREAD, TOKENS, contents, no_progress, package_runner

from qwenonnx.adopt.adopter import Adoption, adopt_folder
from qwenonnx.errors import CheckpointError, PackageError, QwenonnxError, UsageError
from qwenonnx.package.package import Package
from qwenonnx.package.writer import check_target
from qwenonnx.runtime.load import load_runner

TRANSFORMERS_JS = ("onnx/model.onnx", "onnx/model_quantized.onnx")


def adopt(folder: Path, **options: Any) -> Adoption:
    return adopt_folder(folder, stage=no_progress, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return bytes(portable_model(tmp_path_factory.mktemp("model") / "graph").SerializeToString())


@pytest.fixture
def optimum(tiny_fp32: Package, model: bytes, tmp_path: Path) -> Path:
    """A folder as Optimum leaves it."""
    folder = tmp_path / "Tiny-Qwen"
    copy_texts(tiny_fp32, folder, ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"))
    save(onnx.load_from_string(model), folder / "model.onnx", "model.onnx_data")
    return folder


@pytest.fixture
def transformers_js(tiny_fp32: Package, model: bytes, tmp_path: Path) -> Path:
    """A folder of the hub for transformers.js: graphs, whole and quantized, below `onnx`."""
    folder = tmp_path / "web"
    copy_texts(tiny_fp32, folder)
    path = save(onnx.load_from_string(model), folder / "onnx" / "model.onnx")
    extra = {"MatMulConstBOnly": True}
    quantize_dynamic(path, folder / "onnx" / "model_quantized.onnx", weight_type=QuantType.QInt8, extra_options=extra)
    return folder


def change_graph(folder: Path, change: Change, name: str = "model.onnx") -> None:
    model = onnx.load(str(folder / name))
    change(model)
    (folder / name).unlink()
    save(model, folder / name)


def edit_json(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**value, **changes}), encoding="utf-8")


def test_an_optimum_export_is_taken_as_it_is(optimum: Path, tiny_fp32: Package) -> None:
    before = contents(optimum)

    package = adopt(optimum).package

    after = contents(optimum)
    del after["qwenonnx.json"]
    assert after == before
    manifest = package.manifest
    assert (manifest.graph, manifest.recipe, manifest.model) == ("portable", "fp32", "tiny-qwen")
    assert (manifest.model_file, manifest.data_files) == ("model.onnx", ("model.onnx_data",))
    assert set(manifest.files) == set(before)
    assert manifest.source == {"kind": "adopted", "name": "model.onnx"}
    assert manifest.details["adopted"]["producer"] == "qwenonnx"
    assert manifest.details["adopted"]["trial"]["cache_difference"] < 1e-4
    assert manifest.end_token_ids == tiny_fp32.manifest.end_token_ids
    runner = load_runner(package, ONE_THREAD, context_length=64)
    expected = package_runner(tiny_fp32).score(TOKENS, 0)
    np.testing.assert_allclose(runner.score(TOKENS, 0), expected, atol=1e-4, rtol=0)


def test_of_the_graphs_for_transformers_js_the_whole_one_is_taken(transformers_js: Path) -> None:
    adoption = adopt(transformers_js, name="mine")

    manifest = adoption.package.manifest
    assert (manifest.model_file, manifest.recipe, manifest.model) == (TRANSFORMERS_JS[0], "fp32", "mine")
    assert adoption.others == TRANSFORMERS_JS[1:]
    assert TRANSFORMERS_JS[1] not in manifest.files
    assert manifest.data_files == ()


@pytest.mark.parametrize("written", ["below", "whole", "dotted"])
def test_another_graph_is_taken_by_name(written: str, transformers_js: Path) -> None:
    name = TRANSFORMERS_JS[1]
    file = {"below": name, "whole": str(transformers_js / name), "dotted": f"./{name}"}[written]

    adoption = adopt(transformers_js, file=file)

    manifest = adoption.package.manifest
    assert (manifest.model_file, manifest.recipe) == (name, "int8 (MatMulInteger)")
    assert adoption.others == TRANSFORMERS_JS[:1]


def test_adopting_again_replaces_the_manifest_alone(transformers_js: Path) -> None:
    first = adopt(transformers_js).package
    before = contents(transformers_js)

    second = adopt(transformers_js, file=TRANSFORMERS_JS[1]).package

    after = contents(transformers_js)
    assert (first.manifest.recipe, second.manifest.recipe) == ("fp32", "int8 (MatMulInteger)")
    assert after.pop("qwenonnx.json") != before.pop("qwenonnx.json")
    assert after == before
    again = adopt(transformers_js, file=TRANSFORMERS_JS[1]).package
    assert again.manifest == second.manifest


def test_a_genai_folder_needs_no_config(tiny_fp32: Package, tmp_path: Path) -> None:
    folder = genai_folder(tiny_fp32, tmp_path / "genai")

    package = adopt(folder).package

    assert (package.manifest.graph, package.manifest.recipe) == ("genai", "fp32")
    assert package.manifest.context_length == package.config.context_length == 2048
    assert package.config.num_kv_heads == 2
    assert package.generation_config == {
        "eos_token_id": 2,
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 3,
        "top_p": 0.9,
    }
    assert "genai_config.json" in package.manifest.files
    runner = load_runner(package, ONE_THREAD, context_length=64)
    expected = package_runner(tiny_fp32).score(TOKENS, 0)
    np.testing.assert_allclose(runner.score(TOKENS, 0), expected, atol=1e-4, rtol=0)


def test_the_graph_that_the_genai_config_names_comes_first(tiny_fp32: Package, model: bytes, tmp_path: Path) -> None:
    folder = genai_folder(tiny_fp32, tmp_path / "genai")
    (folder / "model.onnx").rename(folder / "cpu.onnx")
    save(onnx.load_from_string(model), folder / "model.onnx")
    config = genai_config()
    config["model"]["decoder"]["filename"] = "cpu.onnx"
    (folder / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")

    adoption = adopt(folder)
    other = adopt(folder, file="model.onnx")

    assert (adoption.package.manifest.model_file, adoption.package.manifest.graph) == ("cpu.onnx", "genai")
    assert adoption.others == ("model.onnx",)
    assert (other.package.manifest.graph, other.package.generation_config["top_k"]) == ("portable", 3)


def test_config_and_generation_config_come_before_what_genai_says(tiny_fp32: Package, tmp_path: Path) -> None:
    folder = genai_folder(tiny_fp32, tmp_path / "genai", context_length=1024)
    copy_texts(tiny_fp32, folder, ("config.json", "generation_config.json"))

    package = adopt(folder).package

    assert package.config == tiny_fp32.config
    assert package.generation_config == tiny_fp32.generation_config


def test_names_with_colons_are_served(optimum: Path) -> None:
    change_graph(optimum, renamed(lambda name: name.replace(".", "::")))

    manifest = adopt(optimum).package.manifest

    assert "past_key_values::0::key" in manifest.inputs


def test_half_precision_is_named(optimum: Path) -> None:
    change_graph(optimum, in_half_precision)

    assert adopt(optimum).package.manifest.recipe == "fp16"


def test_the_hubs_cache_of_links_is_served(transformers_js: Path, optimum: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--Someone--Tiny-ONNX"
    snapshot = repository / "snapshots" / "0123abc"
    (repository / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(optimum.iterdir())):
        blob = repository / "blobs" / f"{number:040x}"
        shutil.copyfile(path, blob)
        link = snapshot / path.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path("../../blobs") / blob.name)

    package = adopt(snapshot).package

    assert package.manifest.model == "tiny-onnx"
    assert np.isfinite(load_runner(package, ONE_THREAD, context_length=64).score(TOKENS, 0)).all()


def test_a_folder_of_links_to_one_that_cannot_be_written_is_served(optimum: Path, tmp_path: Path) -> None:
    folder = tmp_path / "links"
    folder.mkdir()
    for path in optimum.iterdir():
        (folder / path.name).symlink_to(path)
    before = contents(optimum)

    package = adopt(folder).package

    assert np.isfinite(load_runner(package, ONE_THREAD, context_length=64).score(TOKENS, 0)).all()
    assert contents(optimum) == before


@pytest.mark.parametrize("name", ["mod el é 模型 🤖", "100%25 of it", "n" * 200])
def test_odd_folders_are_no_matter(name: str, optimum: Path) -> None:
    folder = optimum.rename(optimum.with_name(name))

    assert Package.open(adopt(folder).package.folder).manifest.model == name.lower()


def test_a_relative_path_with_a_slash_at_its_end(optimum: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(optimum)

    assert adopt(Path("./")).package.manifest.model == "tiny-qwen"


def test_an_adopted_folder_is_never_replaced_by_a_package(optimum: Path) -> None:
    adopt(optimum)

    with pytest.raises(PackageError, match="an adopted package, whose files are not replaced"):
        check_target(optimum)


def with_our_inputs(model: Any) -> None:
    for name in ("seqlens_k", "logits_rows"):
        with_input(name)(model)


GRAPH_FAULTS: dict[str, tuple[Change, str]] = {
    "past input missing": (without_past("past_key_values.1.key"), "no input for the keys of layer 1"),
    "fixed axis": (with_fixed_axis("past_key_values.0.key", 2, 64), r"the past axis of \S+ is fixed to 64"),
    "unknown input": (with_input("cache_position"), "wants an input 'cache_position', which is not known here"),
    "NaN": (with_weights("model.norm.weight", np.nan), "it gives NaN or infinite logits.*take another file"),
    "flat": (with_weights("model.norm.weight", 0.0), "its predictions are as good as uniform"),
    "cache": (with_forgotten_values, "other logits through the KV cache than at once .* so the cache is wrong"),
    "own graph": (with_our_inputs, "qwenonnx has written this graph itself"),
}


@pytest.mark.parametrize("fault", GRAPH_FAULTS)
def test_a_graph_that_cannot_be_used_is_refused_and_nothing_written(fault: str, optimum: Path) -> None:
    change, message = GRAPH_FAULTS[fault]
    change_graph(optimum, change)
    before = contents(optimum)

    with pytest.raises(PackageError, match=message):
        adopt(optimum)
    assert contents(optimum) == before


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("config.json", {"vocab_size": 520}, "it gives 512 logits, but its configuration tells of 520 tokens"),
        ("config.json", {"vocab_size": 300}, "config.json 300; they are of different models"),
        ("config.json", {"num_hidden_layers": 3}, "no input for the keys of layer 2"),
        ("config.json", {"num_key_value_heads": 4}, "its cache has 2 heads of 16"),
        ("config.json", {"model_type": "llama"}, "model_type is 'llama'"),
        ("generation_config.json", {"eos_token_id": [2, 511]}, "the tokenizer has no token 511, which ends an answer"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    name: str, changes: dict[str, Any], message: str, optimum: Path
) -> None:
    edit_json(optimum / name, **changes)

    with pytest.raises((PackageError, CheckpointError), match=message):
        adopt(optimum)
    assert not (optimum / "qwenonnx.json").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokenizer.json", r"there is no tokenizer\.json; put the model's tokenizer files beside the graph"),
        ("tokenizer_config.json", r"there is no tokenizer_config\.json"),
        ("config.json", r"there is no config\.json \(or genai_config\.json\)"),
        ("model.onnx_data", r"model\.onnx_data: the graph's weights are missing; download them too"),
        ("model.onnx", r"there is no \.onnx file in it or in its folder onnx"),
    ],
)
def test_a_missing_file_is_named(name: str, message: str, optimum: Path) -> None:
    (optimum / name).unlink()

    with pytest.raises(PackageError, match=message):
        adopt(optimum)


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "sub/../../secret"])
def test_weights_outside_the_graphs_folder_are_refused(location: str, optimum: Path) -> None:
    (optimum.parent / "secret").write_bytes((optimum / "model.onnx_data").read_bytes())
    model = onnx.load(str(optimum / "model.onnx"), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = location if entry.key == "location" else entry.value
    (optimum / "model.onnx").write_bytes(model.SerializeToString())

    with pytest.raises(PackageError, match=f"its weights are in '{location}', outside the graph's folder"):
        adopt(optimum)


def test_weights_that_are_a_link_to_elsewhere_are_refused(optimum: Path) -> None:
    (optimum / "model.onnx_data").rename(optimum.parent / "elsewhere")
    (optimum / "model.onnx_data").symlink_to(optimum.parent / "elsewhere")

    with pytest.raises(PackageError, match=r"model\.onnx_data: this is a symbolic link to \S+/elsewhere"):
        adopt(optimum)


def test_no_onnx_file_is_said(optimum: Path) -> None:
    (optimum / "model.onnx").write_bytes(b"<html>not found</html>")

    with pytest.raises(PackageError, match=r"model\.onnx: this is no ONNX model"):
        adopt(optimum)


@pytest.mark.parametrize("file", ["model_q4.onnx", "../web/onnx/model.onnx", "onnx", ""])
def test_a_file_that_is_not_there_is_answered_with_the_choices(file: str, transformers_js: Path) -> None:
    with pytest.raises(UsageError, match=f"choose one of {', '.join(TRANSFORMERS_JS)}"):
        adopt(transformers_js, file=file)


def test_a_package_of_this_program_is_left_alone(tiny_fp32: Package, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_fp32.folder, tmp_path / "own")
    before = contents(folder)

    with pytest.raises(PackageError, match="a package of qwenonnx's own, so there is nothing to adopt"):
        adopt(folder)
    assert contents(folder) == before
    (folder / "qwenonnx.json").unlink()
    with pytest.raises(PackageError, match="qwenonnx has written this graph itself, and its manifest is missing"):
        adopt(folder)


def test_a_damaged_manifest_is_not_replaced(optimum: Path) -> None:
    (optimum / "qwenonnx.json").write_text("{", encoding="utf-8")

    with pytest.raises(PackageError, match=r"cannot be read .*; remove this file if the folder is somebody else's"):
        adopt(optimum)


def test_a_folder_that_cannot_be_written_is_refused_at_once(optimum: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)

    with pytest.raises(PackageError, match=r"cannot be written to, and qwenonnx\.json has to go there; copy"):
        adopt(optimum)


@pytest.mark.parametrize("kind", ["nothing", "file"])
def test_what_is_no_folder_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / kind
    if kind == "file":
        path.write_bytes(b"")

    with pytest.raises(PackageError, match="name the folder that another program exported"):
        adopt(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "phi3"}, "model.type is 'phi3', but only Qwen2"),
        ({"vocab_size": "512"}, "vocab_size must be a whole number"),
        ({"context_length": 1}, "context_length must be a whole number between 2 and"),
        ({"decoder": None}, "decoder must be an object"),
        ({"decoder": {**genai_config()["model"]["decoder"], "head_size": 0}}, "head_size must be a whole number"),
        ({"decoder": {**genai_config()["model"]["decoder"], "filename": "no.onnx"}}, "names the graph no.onnx, which"),
        ({"decoder": {**genai_config()["model"]["decoder"], "filename": "../x.onnx"}}, r"names the graph \.\./x.onnx"),
        ({"decoder": {**genai_config()["model"]["decoder"], "sliding_window": {"window_size": 4}}}, "sliding_window"),
        ({"eos_token_id": 511}, "the tokenizer has no token 511"),
    ],
)
def test_a_genai_config_that_cannot_be_used_is_refused(
    changes: dict[str, Any], message: str, tiny_fp32: Package, tmp_path: Path
) -> None:
    folder = genai_folder(tiny_fp32, tmp_path / "genai", **changes)

    with pytest.raises(QwenonnxError, match=message):
        adopt(folder)
    assert not (folder / "qwenonnx.json").exists()


def test_a_pointer_of_git_lfs_is_named_for_what_it_is(optimum: Path) -> None:
    (optimum / "model.onnx").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(PackageError, match=r"model\.onnx: .*pointer of Git LFS.*git lfs pull"):
        adopt(optimum)


@pytest.mark.parametrize("content", [b"", b"\x00\x01nonsense"])
def test_what_is_no_graph_is_refused(optimum: Path, content: bytes) -> None:
    (optimum / "model.onnx").write_bytes(content)
    with pytest.raises(PackageError, match=r"model\.onnx: this is no ONNX model"):
        adopt(optimum)


def test_weights_may_be_named_with_a_dot(optimum: Path) -> None:
    model = onnx.load(str(optimum / "model.onnx"), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "./model.onnx_data"
    (optimum / "model.onnx").write_bytes(model.SerializeToString())
    assert adopt(optimum).package.manifest.data_files == ("model.onnx_data",)


def test_a_template_that_is_no_text_is_named(optimum: Path) -> None:
    (optimum / "chat_template.jinja").write_bytes(b"\xff\xfe{{ 1 }}")
    with pytest.raises(PackageError, match=r"chat_template\.jinja: cannot be read"):
        adopt(optimum)


def test_the_folder_above_is_suggested(transformers_js: Path) -> None:
    with pytest.raises(PackageError, match=rf"there is no tokenizer\.json; did you mean {transformers_js}\?"):
        adopt(transformers_js / "onnx")
