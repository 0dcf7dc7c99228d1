"""The pipe through which scripts/fidelity_peers.py gets other engines' logits."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
WORKER = """
import sys
sys.path.insert(0, {peers!r})
import numpy
from pipe_logits import serve_logits

def score(tokens, start):
    print("an engine's chatter")
    if tokens == [13]:
        sys.exit(1)
    width = {width} + (tokens == [14])
    return numpy.add.outer(numpy.asarray(tokens) + 1000 * start, numpy.arange(width) / 8)

{before}
serve_logits(lambda: (score, {width}))
"""


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("fidelity_peers", SCRIPTS / "fidelity_peers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def command(folder: Path, *, width: int = 5, before: str = "") -> list[str]:
    worker = folder / "worker.py"
    text = WORKER.format(peers=str(SCRIPTS / "peers"), width=width, before=before)
    worker.write_text(text, encoding="utf-8")
    return [sys.executable, str(worker)]


def test_logits_come_through_the_pipe_bit_for_bit_whatever_the_engine_prints(script: Any, tmp_path: Path) -> None:
    with script.PeerScorer("fake", command(tmp_path)) as scorer:
        assert scorer.width == 5
        for tokens, start in (([3, 10, 13], 0), ([7], 3)):
            expected = np.add.outer(np.array(tokens) + 1000 * start, np.arange(5) / 8).astype(np.float32)
            np.testing.assert_array_equal(scorer.score(tokens, start), expected)


def test_answers_larger_than_a_pipe_holds_arrive_whole(script: Any, tmp_path: Path) -> None:
    with script.PeerScorer("fake", command(tmp_path, width=100_000)) as scorer:
        logits = scorer.score([1, 2, 3], 0)
    assert logits.shape == (3, 100_000)
    assert logits[2, -1] == np.float32(3 + 99_999 / 8)


@pytest.mark.parametrize("token", [13, 14], ids=["engine ends", "logits of another width"])
def test_a_worker_that_fails_is_named(script: Any, tmp_path: Path, token: int) -> None:
    with (
        pytest.raises(RuntimeError, match="the fake worker ended early"),
        script.PeerScorer("fake", command(tmp_path)) as scorer,
    ):
        scorer.score([token], 0)


def test_a_worker_that_cannot_load_its_model_is_named(script: Any, tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="the fake worker ended before its model was loaded"),
        script.PeerScorer("fake", command(tmp_path, before="sys.exit(1)")),
    ):
        pass


def test_clipped_logits_are_the_first_ones(script: Any, tmp_path: Path) -> None:
    with script.PeerScorer("fake", command(tmp_path)) as scorer:
        clipped = script.Clipped(scorer, 3).score([1, 2], 0)
        np.testing.assert_array_equal(clipped, scorer.score([1, 2], 0)[:, :3])


def test_the_size_on_disk_is_that_of_all_files_of_a_folder_or_of_the_file(script: Any, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(b"1234")
    (tmp_path / "inner" / "b").write_bytes(b"567")
    assert script.peer("folder", tmp_path, []).bytes_on_disk == 7
    assert script.peer("file", tmp_path / "a", []).bytes_on_disk == 4
