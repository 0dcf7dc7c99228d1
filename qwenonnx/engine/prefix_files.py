"""Rows of the KV cache as files, so that what was read stays known when the process ends."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qwenonnx.package.package import Package

logger = logging.getLogger(__name__)

_FORMAT = 1
_SUFFIX = ".kv"
_PARTIAL = ".partial"
# A partial file of this age was left by a process that was killed.
_STALE_SECONDS = 3600.0
_LONGEST_HEADER = 4096
_NAME_DIGITS = 16


class DamagedError(Exception):
    """A file does not hold what it should; its text says why."""


@dataclass(frozen=True, slots=True)
class PrefixFiles:
    """A folder with one file for each row: a header, token ids, keys and values of all layers, and a SHA-256.

    They belong to one package (`package_sum`): another one's weights give other keys. All files together take at most
    `limit` bytes, the longest unused go first. What they hold are users' prompts, so only the user may read them.
    """

    folder: Path
    package_sum: str
    limit: int

    def path(self, token_ids: Sequence[int]) -> Path:
        """Where the row with these tokens lies, if it does."""
        digest = hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes()).hexdigest()
        return self.folder / f"{self.package_sum[:_NAME_DIGITS]}-{digest[:_NAME_DIGITS]}{_SUFFIX}"

    def newest_first(self) -> list[Path]:
        """This package's files."""
        return [path for path in self._all() if path.name.startswith(f"{self.package_sum[:_NAME_DIGITS]}-")]

    def write(self, token_ids: Sequence[int], arrays: Sequence[NDArray[Any]], stop: Callable[[], bool]) -> bool:
        """Writes a row, of which `arrays` are keys and values `[kv_heads, tokens, head_dim]` of all layers in order.

        Returns False, and leaves no file, if `stop` says so on the way.

        Raises:
            OSError: the folder cannot be written to.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=self.folder, suffix=_PARTIAL)
        try:
            with os.fdopen(handle, "wb") as file:
                digest = hashlib.sha256()
                for piece in self._pieces(token_ids, arrays):
                    if stop():
                        return False
                    digest.update(piece)
                    file.write(piece)
                file.write(digest.digest())
            # Not synced: a file that a crash cuts off does not match its sum and is not used.
            Path(temporary).replace(self.path(token_ids))
            return True
        finally:
            Path(temporary).unlink(missing_ok=True)

    def read_tokens(self, path: Path) -> list[int]:
        """The token ids of a file's header; the rest of it is not checked.

        Raises:
            DamagedError: it is not a file of this package and format.
            OSError: it cannot be read.
        """
        with path.open("rb") as file:
            return self._read_start(file, hashlib.sha256())[0]

    def read_into(self, path: Path, arrays: Sequence[NDArray[Any]]) -> None:
        """Reads keys and values into `arrays`, as `write` takes them; after an error their contents are undefined.

        Raises:
            DamagedError: the file is cut off or was changed, or holds arrays of other sizes.
            OSError: it cannot be read.
        """
        digest = hashlib.sha256()
        with path.open("rb") as file:
            _, header = self._read_start(file, digest)
            if header["arrays"] != _describe(arrays):
                raise DamagedError("its sizes are those of another model")
            for array in arrays:
                data = file.read(array.nbytes)
                if len(data) != array.nbytes:
                    raise DamagedError("it is cut off")
                digest.update(data)
                array[...] = np.frombuffer(data, dtype=array.dtype).reshape(array.shape)
            if file.read(digest.digest_size + 1) != digest.digest():
                raise DamagedError("it does not match its sum")

    def touch(self, token_ids: Sequence[int], age: float) -> None:
        """Makes a file one that was used `age` seconds ago."""
        moment = time.time() - age
        with contextlib.suppress(OSError):
            os.utime(self.path(token_ids), (moment, moment))

    def prune(self) -> None:
        """Removes files of any package, the longest unused first, until the rest are within the limit."""
        total = 0
        for path in self._all():
            with contextlib.suppress(OSError):
                total += path.stat().st_size
                if total > self.limit:
                    path.unlink()
        for path in self.folder.glob(f"*{_PARTIAL}"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()

    def _all(self) -> list[Path]:
        ages = {}
        for path in self.folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                ages[path] = path.stat().st_mtime
        return sorted(ages, key=lambda path: (-ages[path], path.name))

    def _pieces(self, token_ids: Sequence[int], arrays: Sequence[NDArray[Any]]) -> Iterator[bytes]:
        header = {
            "format": _FORMAT,
            "package": self.package_sum,
            "tokens": len(token_ids),
            "arrays": _describe(arrays),
        }
        yield json.dumps(header).encode() + b"\n"
        yield np.asarray(token_ids, dtype="<i4").tobytes()
        for array in arrays:
            yield array.tobytes()

    def _read_start(self, file: BinaryIO, digest: Any) -> tuple[list[int], dict[str, Any]]:
        line = file.readline(_LONGEST_HEADER)
        try:
            header = json.loads(line)
            known = (header["format"], header["package"]) == (_FORMAT, self.package_sum)
            count, _ = int(header["tokens"]), header["arrays"]
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError("its header cannot be read") from error
        if not known or not 0 < count < 1 << 31:
            raise DamagedError("it belongs to another package or version")
        if os.fstat(file.fileno()).st_size < 4 * count:  # nothing of a size that is not there is asked for
            raise DamagedError("it is cut off")
        ids = file.read(4 * count)
        if len(ids) != 4 * count:
            raise DamagedError("it is cut off")
        digest.update(line)
        digest.update(ids)
        return np.frombuffer(ids, dtype="<i4").tolist(), header


def _describe(arrays: Sequence[NDArray[Any]]) -> list[Any]:
    return [len(arrays), str(arrays[0].dtype), list(arrays[0].shape)]


def package_sum(package: Package) -> str:
    """Hex SHA-256 of the sums of a package's graph and weights."""
    names = (package.manifest.model_file, *package.manifest.data_files)
    return hashlib.sha256("".join(package.manifest.files[name].sha256 for name in names).encode()).hexdigest()
