"""`qwenonnx adopt`, and the other commands on what it makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from fastapi.testclient import TestClient
from foreign_graphs import copy_texts, genai_folder, in_half_precision, portable_model, save
from packages import ONE_THREAD, no_progress
from typer.testing import CliRunner, Result

from qwenonnx.adopt.adopter import adopt_folder
from qwenonnx.cli.main import app
from qwenonnx.engine.load import load_model
from qwenonnx.package.package import Package
from qwenonnx.server.app import create_app
from qwenonnx.server.config import ServeConfig
from qwenonnx.server.served import GenerationDefaults, Served

PROMPT = "The quick brown fox jumps over the"
BENCH = ("--prompt", "3", "--new-tokens", "4", "--repeats", "1", "--threads", "1")
TEXTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def run(*args: str | Path, text: str | None = None, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=text)
    assert result.exit_code == code, result.stderr
    return result


@pytest.fixture(scope="module")
def folders(tiny_fp32: Package, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the tiny model as other programs leave them; the whole graph of `portable` has a half beside it."""
    root = tmp_path_factory.mktemp("foreign")
    model = portable_model(root / "graph")
    copy_texts(tiny_fp32, root / "portable", TEXTS)
    save(model, root / "portable" / "onnx" / "model.onnx")
    in_half_precision(model)
    save(model, root / "portable" / "onnx" / "model_fp16.onnx")
    return {"portable": root / "portable", "genai": genai_folder(tiny_fp32, root / "genai")}


@pytest.fixture(scope="module")
def adopted(folders: dict[str, Path]) -> dict[str, Package]:
    return {name: adopt_folder(folder, stage=no_progress).package for name, folder in folders.items()}


def test_what_was_taken_is_said_and_the_folder_printed(folders: dict[str, Path]) -> None:
    result = run("adopt", folders["portable"])
    other = run("adopt", folders["portable"], "--file", "onnx/model_fp16.onnx", "--name", "half")
    quiet = run("adopt", folders["portable"], "-q")

    assert result.stdout == other.stdout == quiet.stdout == f"{folders['portable']}\n"
    assert "took onnx/model.onnx: fp32, a portable graph\n" in result.stderr
    assert "also there: onnx/model_fp16.onnx; --file chooses another one\n" in result.stderr
    assert "took onnx/model_fp16.onnx: fp16, a portable graph\n" in other.stderr
    assert quiet.stderr == ""


def test_a_missing_chat_template_is_said(tiny_fp32: Package, folders: dict[str, Path], tmp_path: Path) -> None:
    copy_texts(tiny_fp32, tmp_path / "base")
    save(onnx.load(str(folders["portable"] / "onnx" / "model.onnx")), tmp_path / "base" / "model.onnx")
    path = tmp_path / "base" / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    template = config.pop("chat_template")
    path.write_text(json.dumps(config), encoding="utf-8")

    without = run("adopt", tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").write_text(template, encoding="utf-8")
    beside = run("adopt", tmp_path / "base")

    assert "there is no chat template, so it completes prompts, but answers no chats" in without.stderr
    assert "no chat template" not in beside.stderr
    assert "chat_template.jinja" in Package.open(tmp_path / "base").manifest.files


def test_faults_end_with_one_sentence(tiny_fp32: Package, folders: dict[str, Path], tmp_path: Path) -> None:
    own = run("adopt", tiny_fp32.folder, code=1)
    nothing = run("adopt", tmp_path / "nothing", code=1)
    file = run("adopt", folders["portable"], "--file", "model.onnx", code=2)

    assert "a package of qwenonnx's own" in own.stderr
    assert "there is no such folder" in nothing.stderr
    assert "choose one of onnx/model.onnx, onnx/model_fp16.onnx" in file.stderr
    for result in (own, nothing, file):
        assert result.stderr.splitlines()[-1].startswith("qwenonnx: ")
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("kind", "requests"),
    [
        ("portable", "run in turn; each has a cache of its own, which grows and is copied at every step"),
        ("genai", "run together"),
    ],
)
def test_inspect_says_how_requests_run(kind: str, requests: str, adopted: dict[str, Package]) -> None:
    shown = run("inspect", adopted[kind].folder).stdout

    assert f"requests       {requests}\n" in shown
    assert f"fp32 ({kind} graph)\n" in shown
    assert "source         adopted " in shown
    assert "exported by    qwenonnx\n" in shown
    assert "None" not in shown
    assert "all files match their sums" in shown


@pytest.mark.parametrize("kind", ["portable", "genai"])
def test_the_other_commands_take_it(kind: str, adopted: dict[str, Package], tiny_fp32: Package) -> None:
    folder = adopted[kind].folder

    report = run("eval", folder, "--reference", tiny_fp32.folder, "--max-tokens", "16", "--json", "-", "-q")
    measured = run("bench", folder, *BENCH)
    answered = run("chat", folder, "--max-tokens", "8", text="Hello")
    expected = run("chat", tiny_fp32.folder, "--max-tokens", "8", text="Hello")

    assert json.loads(report.stdout)["kl_mean"] < 1e-6
    assert "3 + 4" in measured.stdout
    if kind == "portable":  # the sampling parameters of the other are genai's own
        assert answered.stdout == expected.stdout


def test_graphs_of_several_kinds_are_compared_in_one_run(adopted: dict[str, Package], tiny_int8: Package) -> None:
    line = ("eval", adopted["portable"].folder, tiny_int8.folder, "--reference", adopted["genai"].folder)

    report = json.loads(run(*line, "--max-tokens", "16", "--json", "-", "-q").stdout)

    assert report["packages"]["portable"]["top1_agreement"] == 1
    assert 0 < report["packages"]["int8"]["kl_mean"] < 0.1


def test_without_a_package_to_compare_with_the_option_is_named(adopted: dict[str, Package]) -> None:
    line = run("eval", adopted["genai"].folder, "-q", code=2).stderr

    assert line.endswith("name a package of the same model with --reference.\n")


@pytest.mark.parametrize("kind", ["portable", "genai"])
def test_it_is_served_as_the_packages_of_this_program_are(
    kind: str, adopted: dict[str, Package], tiny_fp32: Package
) -> None:
    answers = [served_answers(package) for package in (adopted[kind], tiny_fp32)]

    assert answers[0] == answers[1]


def served_answers(package: Package) -> list[Any]:
    """What a server of the package answers, streamed and not, and its counts of tokens."""
    model = load_model(package, ONE_THREAD, context_length=256)
    served = Served(
        engine=model.engine,
        tokenizer=model.tokenizer,
        chat_template=model.chat_template,
        model_name="tiny",
        created=0,
        context_length=model.context_length,
        defaults=GenerationDefaults(),
    )
    question = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "temperature": 0}
    with TestClient(create_app(lambda: served, ServeConfig())) as client:
        while client.get("/health").status_code == 503:
            pass
        answer = client.post("/v1/chat/completions", json=question).json()
        again = client.post("/v1/chat/completions", json=question).json()
        completion = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 5, "temperature": 0}).json()
        with client.stream("POST", "/v1/chat/completions", json={**question, "stream": True}) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    streamed = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    text = answer["choices"][0]["message"]["content"]
    assert text == streamed == again["choices"][0]["message"]["content"]
    return [text, completion["choices"][0]["text"], answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]]
