import socket
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from fake_hub import FakeHub
from tiny import tiny_weights, write_tiny_checkpoint, write_tiny_gguf

import qwenonnx.pull.hub as hub_module
from qwenonnx.checkpoint.open import open_checkpoint
from qwenonnx.errors import OfflineError, PullError
from qwenonnx.pull.pull import is_pulled, pull

REPO = "Someone/Tiny-Qwen"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    folder = write_tiny_checkpoint(tmp_path / "origin")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files |= {"README.md": b"# hello", "pytorch_model.bin": b"pickle", "onnx/model.onnx": b"onnx"}
    with FakeHub(REPO, files) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield running


def quiet(line: str) -> None:
    assert "\n" not in line


def test_pull_gets_what_a_checkpoint_needs_and_no_more(hub: FakeHub, tmp_path: Path) -> None:
    folder = pull(REPO, tmp_path / "models", quiet)
    assert folder == tmp_path / "models" / "tiny-qwen" / "checkpoint"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]
    checkpoint = open_checkpoint(folder)
    assert np.array_equal(checkpoint.tensor("model.norm.weight"), tiny_weights()["model.norm.weight"])
    assert checkpoint.source().name == "tiny-qwen"


def test_finished_checkpoint_is_not_touched_again(hub: FakeHub, tmp_path: Path) -> None:
    pull(REPO, tmp_path / "models", quiet)
    hub.requests.clear()
    lines: list[str] = []
    pull(REPO, tmp_path / "models", lines.append)
    assert hub.requests == []
    assert "already" in lines[0]


def test_interrupted_pull_is_not_finished_and_resumes(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    hub.cut_after = 100_000
    with pytest.raises(PullError, match="broke off") as caught:
        pull(REPO, tmp_path / "models", quiet)
    assert not isinstance(caught.value, OfflineError)
    assert not is_pulled(tmp_path / "models", "tiny-qwen")
    hub.cut_after = None
    hub.requests.clear()
    folder = pull(REPO, tmp_path / "models", quiet)
    assert hub.downloads() == ["model.safetensors"]
    resumed = [wanted for method, _, wanted in hub.requests if method == "GET" and wanted]
    assert len(resumed) == 1
    assert int(resumed[0].removeprefix("bytes=").partition("-")[0]) > 50_000
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_file_with_a_wrong_sum_is_refused_and_fetched_anew(hub: FakeHub, tmp_path: Path, name: str) -> None:
    damaged = bytearray(hub.files[name])
    damaged[-1] ^= 1
    hub.swapped[name] = bytes(damaged)
    with pytest.raises(PullError, match=f"{name} arrived damaged"):
        pull(REPO, tmp_path / "models", quiet)
    assert not is_pulled(tmp_path / "models", "tiny-qwen")
    hub.swapped.clear()
    folder = pull(REPO, tmp_path / "models", quiet)
    assert (folder / name).read_bytes() == hub.files[name]


def test_one_gguf_file_of_a_repository(hub: FakeHub, tmp_path: Path) -> None:
    content = write_tiny_gguf(tmp_path / "x.gguf").read_bytes()
    hub.files = {"Tiny-Q8_0.gguf": content, "Tiny-Q4_0.gguf": b"other"}
    folder = pull(f"{REPO}:Tiny-Q8_0.gguf", tmp_path / "models", quiet)
    assert folder.parent.name == "tiny-q8_0"
    assert [path.name for path in folder.iterdir()] == ["Tiny-Q8_0.gguf"]
    assert open_checkpoint(folder).source().kind == "gguf"
    with pytest.raises(PullError, match=r"name one as Someone/Tiny-Qwen:FILE \(Tiny-Q8_0\.gguf, Tiny-Q4_0\.gguf\)"):
        pull(REPO, tmp_path / "models", quiet)
    with pytest.raises(PullError, match=r"no file Tiny-Q5_0\.gguf, but Tiny-Q8_0\.gguf"):
        pull(f"{REPO}:Tiny-Q5_0.gguf", tmp_path / "models", quiet)


def test_repository_without_weights(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}"}
    with pytest.raises(PullError, match="no weights"):
        pull(REPO, tmp_path / "models", quiet)


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("RepoNotFound", 404, "has no model Someone/Tiny-Qwen; check the spelling"),
        ("RepoNotFound", 401, "set HF_TOKEN if the model is private"),
        ("GatedRepo", 403, "accept them and set HF_TOKEN"),
        ("RevisionNotFound", 404, "no such revision"),
        ("Other", 403, "check HF_TOKEN"),
    ],
)
def test_refusals_of_the_hub_are_one_sentence(
    hub: FakeHub, tmp_path: Path, code: str, status: int, message: str
) -> None:
    hub.error_code, hub.status = code, status
    with pytest.raises(PullError, match=message) as caught:
        pull(REPO, tmp_path / "models", quiet)
    assert not isinstance(caught.value, OfflineError)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "models" / "tiny-qwen").exists()


@pytest.mark.parametrize("status", [500, 503])
def test_hub_that_is_down_counts_as_no_answer(hub: FakeHub, tmp_path: Path, status: int) -> None:
    hub.error_code, hub.status = "Down", status
    with pytest.raises(OfflineError, match=f"status {status}"):
        pull(REPO, tmp_path / "models", quiet)


def test_offline_switch_keeps_every_request_back(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OfflineError, match="HF_HUB_OFFLINE is set"):
        pull(REPO, tmp_path / "models", quiet)
    assert hub.requests == []


def test_refused_connection_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(OfflineError, match="does not answer"):
            pull(REPO, tmp_path / "models", quiet)


def test_silent_hub_is_given_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_PROBE_SECONDS", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(OfflineError, match="does not answer"):
            pull(REPO, tmp_path / "models", quiet)
