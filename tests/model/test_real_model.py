"""The whole line on the real 0.5B weights: what is written, how faithful it is, and what it answers."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import openai
import pytest
from packages import extents

from qwenonnx.checkpoint.open import open_checkpoint
from qwenonnx.engine.load import load_model
from qwenonnx.engine.request import Delta, Finished, GenerationRequest
from qwenonnx.evaluate.fidelity import FidelityReport, measure_fidelity
from qwenonnx.evaluate.texts import bundled_texts
from qwenonnx.export.verify import MAX_LOGIT_DIFFERENCE
from qwenonnx.graph.int8 import HEAD_PIECES
from qwenonnx.package.package import Package
from qwenonnx.quantize.quantizer import quantize_package
from qwenonnx.runtime.load import PackageRunner, load_runner, session_config
from qwenonnx.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

MB = 1_000_000


@pytest.fixture(scope="module")
def fp32(model_checkpoint: Path) -> Package:
    return Package.open(model_checkpoint.parents[1] / "fp32")


@pytest.fixture(scope="module")
def int8(model_checkpoint: Path) -> Package:
    return Package.open(model_checkpoint.parents[1] / "int8")


@pytest.fixture(scope="module")
def tokenizer(int8: Package) -> Tokenizer:
    return Tokenizer.load(int8.folder)


@pytest.fixture(scope="module")
def fp32_runner(fp32: Package) -> PackageRunner:
    return load_runner(fp32, session_config(), context_length=1024)


@pytest.fixture(scope="module")
def int8_runner(int8: Package) -> PackageRunner:
    return load_runner(int8, session_config(), context_length=8192)


@pytest.fixture(scope="module")
def report(fp32_runner: PackageRunner, int8_runner: PackageRunner, tokenizer: Tokenizer) -> FidelityReport:
    return measure_fidelity(fp32_runner, int8_runner, tokenizer, bundled_texts(), max_tokens=192)


def test_the_export_was_checked_against_the_checkpoint(fp32: Package) -> None:
    check = fp32.manifest.details["verification"]
    assert check["positions"] == 64
    assert check["top1_agreement"] == 1
    assert check["max_logit_difference"] < MAX_LOGIT_DIFFERENCE
    assert fp32.manifest.context_length == 32_768
    assert fp32.manifest.num_tokens == 151_665
    assert fp32.manifest.end_token_ids == (151_643, 151_645)


def test_the_graph_has_a_past_and_a_present_for_all_layers(fp32: Package) -> None:
    graph = onnx.load(str(fp32.model_path), load_external_data=False).graph
    past = [value for value in graph.input if value.name.startswith("past_key_values.")]
    assert len(past) == 48
    assert len([value for value in graph.output if value.name.startswith("present.")]) == 48
    dims = past[0].type.tensor_type.shape.dim
    assert [dims[1].dim_value, dims[3].dim_value] == [2, 64]


def test_the_data_file_holds_little_but_weights_and_the_tied_matrix_once(fp32: Package, int8: Package) -> None:
    for package in (fp32, int8):
        lengths = sum(length for _, length in extents(package.model_path))
        assert lengths >= 0.999 * package.data_paths[0].stat().st_size
    assert fp32.bytes < 2_010 * MB
    assert int8.bytes <= 540 * MB


def test_all_linears_are_quantized(int8: Package) -> None:
    graph = onnx.load(str(int8.model_path), load_external_data=False).graph
    operators = Counter(node.op_type for node in graph.node)
    assert operators["MatMulIntegerToFloat"] == 24 * 5  # qkv are one, then o, gate, up, down
    assert operators["QGemm"] == HEAD_PIECES
    floats = [
        tensor.name
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT and np.prod(tensor.dims) > 1_000_000
    ]
    assert sorted(floats) == ["cos_cache", "sin_cache"]


def test_int8_is_faithful_in_every_language(report: FidelityReport) -> None:
    overall = report.overall
    assert overall.kl_mean <= 0.003
    assert overall.top1_agreement >= 0.95
    assert overall.perplexity / overall.reference_perplexity < 1.01
    assert {"arabic", "hebrew", "chinese", "python_code"} <= {text.name for text in report.texts}
    assert max(text.comparison.kl_mean for text in report.texts) < 0.006


@pytest.mark.parametrize("name", ["fp32_runner", "int8_runner"])
def test_a_text_gives_the_same_at_once_and_in_pieces(
    name: str, request: pytest.FixtureRequest, tokenizer: Tokenizer
) -> None:
    runner: PackageRunner = request.getfixturevalue(name)
    ids = tokenizer.encode("The river rises in the mountains and reaches the sea after many days.")[:12]
    whole = runner.score(ids, 0)
    singles = np.concatenate([runner.score([token], i) for i, token in enumerate(ids)])
    pieces = np.concatenate([runner.score(ids[:5], 0), runner.score(ids[5:], 5)])
    for other in (singles, pieces):
        assert (other.argmax(-1) == whole.argmax(-1)).all()
    if name == "fp32_runner":
        assert np.abs(singles - whole).max() < 1e-3
        assert np.abs(pieces - whole).max() < 1e-3


def test_the_capital_of_france(int8_runner: PackageRunner, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The capital of France is")
    logits = int8_runner.prefill(0, ids, 0)
    answer = []
    for position in range(len(ids), len(ids) + 5):
        answer.append(int(logits.argmax()))
        logits = int8_runner.decode(answer[-1:], [position])[0]
    assert "Paris" in tokenizer.decode(answer)


def test_last_row_logits_equal_those_of_all_rows(int8_runner: PackageRunner, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(bundled_texts()[0].text)[:200]
    last = int8_runner.prefill(0, ids, 0).copy()
    np.testing.assert_allclose(last, int8_runner.score(ids, 0)[-1], atol=1e-4)


@pytest.mark.parametrize("cut", [16, 100])
def test_int8_gives_the_same_bits_however_a_prompt_is_cut(
    int8_runner: PackageRunner, tokenizer: Tokenizer, cut: int
) -> None:
    ids = tokenizer.encode(bundled_texts()[0].text)[:200]
    whole = int8_runner.score(ids, 0)
    pieces = np.concatenate([int8_runner.score(ids[i : i + cut], i) for i in range(0, len(ids), cut)])
    np.testing.assert_array_equal(pieces, whole)


def test_int8_gives_the_same_bits_alone_and_in_a_batch(int8: Package, tokenizer: Tokenizer) -> None:
    runner = load_runner(int8, session_config(), context_length=64, num_slots=4)
    ids = tokenizer.encode(bundled_texts()[3].text)[:30]
    alone = [runner.decode([token], [i])[0].copy() for i, token in enumerate(ids)]
    for i, token in enumerate(ids):
        batched = runner.decode([token, 11, ids[-i], 5], [i] * 4)
        np.testing.assert_array_equal(batched[0], alone[i])


def test_a_repeated_question_gets_the_same_answer(int8: Package) -> None:
    model = load_model(int8, session_config(), context_length=512)
    model.engine.start()
    try:

        def ask(question: str) -> tuple[list[int], int]:
            prompt = tuple(model.chat_template.encode([{"role": "user", "content": question}]))
            events = list(model.engine.generate(GenerationRequest(prompt, max_tokens=40)))
            ids = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
            assert isinstance(events[-1], Finished)
            return ids, events[-1].usage.cached_tokens

        for question in ("How do I sort a list of tuples by their second item?", "Why is the sky blue?"):
            cold, _ = ask(question)
            again, cached = ask(question)
            assert cached > 20
            assert again == cold
            ask("Say hi.")
            assert ask(question)[0] == cold
    finally:
        model.engine.close()


def test_quantizing_again_gives_the_same_bytes(fp32: Package, int8: Package, tmp_path: Path) -> None:
    again = quantize_package(fp32, tmp_path / "int8", "int8", stage=lambda label: lambda done, total: None)
    assert again.manifest == int8.manifest


def test_the_gguf_checkpoint_is_tied_and_has_biases(model_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(model_checkpoint)
    assert checkpoint.config.tie_word_embeddings
    assert np.abs(checkpoint.tensor("model.layers.0.self_attn.q_proj.bias")).max() > 0.1


@pytest.fixture(scope="module")
def server(int8: Package) -> Iterator[tuple[str, int]]:
    """A server process on a free port: its address and process id."""
    command = [sys.executable, "-m", "qwenonnx", "serve", str(int8.folder), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if "Ready: serving" in line:
                break
        found = re.search(r"http://\S+:\d+", "".join(lines))
        assert found, "".join(lines)
        yield found.group(), process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


def test_a_streamed_answer_is_code_that_works(server: tuple[str, int]) -> None:
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[
                {"role": "user", "content": "Write a Python function add(a, b) that returns their sum. Only code."}
            ],
            stream=True,
            max_tokens=120,
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert len(pieces) > 5
    answer = "".join(pieces)
    block = re.search(r"```(?:python)?\n(.*?)```", answer, re.DOTALL)
    names: dict[str, object] = {}
    exec(block.group(1) if block else answer, names)
    add = names["add"]
    assert callable(add)
    assert add(2, 3) == 5


def test_serving_with_a_4000_token_prompt_takes_at_most_850_mb(server: tuple[str, int]) -> None:
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none") as client:
        answer = client.completions.create(
            model=client.models.list().data[0].id, prompt=[1_000 + i % 500 for i in range(4_000)], max_tokens=2
        )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4_000
    status = Path(f"/proc/{server[1]}/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None
    assert int(peak.group(1)) * 1024 <= 850 * MB
