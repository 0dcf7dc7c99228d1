"""Fixtures that several test folders share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from packages import export_folder, quantize
from tiny import write_tiny_checkpoint

from qwenonnx.package.package import Package
from qwenonnx.text.tokenizer import Tokenizer

# No deadline: a busy machine is no fault of the code. The same examples each time, and nothing kept on disk.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")

MODELS = Path(__file__).parents[1] / "models"


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny random Qwen2 in fp32; shared by the session, so tests must not write into it."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="session")
def model_checkpoint() -> Path:
    """The real Coder-0.5B GGUF; only tests marked `model` may ask for it."""
    folder = MODELS / "qwen2.5-coder-0.5b-instruct" / "checkpoint"
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        pytest.fail(f"no single .gguf file in {folder}; run `make test-model`, which fetches the weights first")
    return files[0]


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    """The tokenizer of the tiny model; nothing changes it, so the session shares it."""
    return Tokenizer.load(tiny_checkpoint)


@pytest.fixture(scope="session")
def model_tokenizer_folder() -> Path:
    """The first folder below models/ with the real tokenizer; only tests marked `model` may ask for it."""
    files = sorted(MODELS.glob("*/*/tokenizer.json"))
    if not files:
        pytest.fail(f"no tokenizer.json below {MODELS}; run `make test-model`, which exports the model first")
    return files[0].parent


@pytest.fixture(scope="session")
def tiny_fp32(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The tiny model exported; shared by the session, so tests must not write into its folder."""
    return export_folder(tiny_checkpoint, tmp_path_factory.mktemp("packages") / "fp32")


@pytest.fixture(scope="session")
def tiny_int8(tiny_fp32: Package) -> Package:
    """The tiny model quantized, beside `tiny_fp32`; shared as well."""
    return quantize(tiny_fp32, tiny_fp32.folder.parent / "int8")
