from pathlib import Path

import pytest
from tiny import write_tiny_checkpoint, write_tiny_gguf

from qwenonnx.checkpoint.open import open_checkpoint
from qwenonnx.errors import CheckpointError


def test_the_content_decides_what_a_checkpoint_is(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "folder.gguf")
    file = write_tiny_gguf(tmp_path / "weights.bin")
    assert open_checkpoint(folder).source().kind == "safetensors"
    assert open_checkpoint(file).source().kind == "gguf"


def test_folder_with_one_gguf_file(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "a.gguf")
    assert open_checkpoint(tmp_path).source().name == "a"
    write_tiny_gguf(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"several GGUF files \(a.gguf, b.gguf\)"):
        open_checkpoint(tmp_path)


def test_safetensors_win_over_gguf_in_one_folder(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "a.gguf")
    write_tiny_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path).source().kind == "safetensors"


def test_pickled_weights_are_refused_with_the_remedy(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="convert them to safetensors"):
        open_checkpoint(tmp_path)


def test_weights_without_configuration(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(tmp_path)


def test_several_weight_files_without_index(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


def test_single_safetensors_file_points_to_its_folder(tiny_checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="name its folder"):
        open_checkpoint(tiny_checkpoint / "model.safetensors")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        open_checkpoint(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="symbolic link"):
        open_checkpoint(tmp_path / "link")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)


def test_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_checkpoint(tmp_path / "notes.txt")
