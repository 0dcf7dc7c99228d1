"""One GGUF file: metadata and a checked table of tensors over a memory map.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and 3, little endian. Only
block sizes come from the `gguf` package; its own reader takes seconds for a vocabulary of 150,000 tokens.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from qwenonnx.checkpoint.weight_files import RE_DOWNLOAD, map_file, release_pages
from qwenonnx.errors import CheckpointError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MIN_PAIR = 8 + 4 + 1  # key length, type, one byte of value
_MIN_TENSOR = 8 + 4 + 8 + 4 + 8  # name length, number of dimensions, one of them, type, offset
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies; `shape` is `[rows, columns]` (the file has it reversed), `offset` absolute."""

    name: str
    shape: tuple[int, ...]
    type: int
    block: int
    block_bytes: int
    offset: int
    size: int

    @property
    def bits(self) -> float:
        """Bits that one weight takes."""
        return 8 * self.block_bytes / self.block


def gguf_package() -> ModuleType:
    """The `gguf` package, imported when first needed.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            "Reading GGUF files needs the Python package 'gguf', which is not installed; run: pip install gguf"
        ) from error
    module: ModuleType = gguf
    return module


class GgufFile:
    """A GGUF file whose header has been read and whose tensors all lie within the file.

    `metadata` holds the key-value pairs as Python values, `tensors` the tensors by name.

    Raises:
        CheckpointError: the file is not GGUF, is damaged or cut short, or is of a form that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        header = _Header(path, memoryview(self._map))
        try:
            self.version, self.metadata, infos, end = header.read()
        finally:
            header.release()
        self.tensors = self._place(infos, end)

    def raw(self, tensor: GgufTensor) -> memoryview:
        """The tensor's bytes in the map, without a copy."""
        return memoryview(self._map)[tensor.offset : tensor.offset + tensor.size]

    def release(self) -> None:
        """Takes what has been read out of this process's memory."""
        release_pages(self._map)

    def _place(self, infos: list[tuple[str, tuple[int, ...], int, int]], end: int) -> dict[str, GgufTensor]:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise CheckpointError(
                f"{self.path}: general.alignment is {alignment!r}, not a power of two; {RE_DOWNLOAD}."
            )
        start = -(-end // alignment) * alignment
        gguf = gguf_package()
        sizes = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in infos:
            if kind not in sizes:
                raise CheckpointError(
                    f"{self.path}: tensor {name} has type {kind}, which the installed gguf package does not "
                    "know; run: pip install --upgrade gguf"
                )
            block, block_bytes = sizes[kind]
            if shape[-1] % block or offset % alignment:
                raise CheckpointError(f"{self.path}: the entry of tensor {name} is inconsistent; {RE_DOWNLOAD}.")
            if name in tensors:
                raise CheckpointError(f"{self.path}: tensor {name} is listed twice; {RE_DOWNLOAD}.")
            size = math.prod(shape) // block * block_bytes
            tensors[name] = GgufTensor(name, shape, kind, block, block_bytes, start + offset, size)
        expected = max((tensor.offset + tensor.size for tensor in tensors.values()), default=start)
        if expected > len(self._map):
            raise CheckpointError(
                f"{self.path}: the header describes a file of {expected:,} bytes (expected size), but the "
                f"actual size is {len(self._map):,}; {RE_DOWNLOAD}."
            )
        return tensors


class _Header:
    """A cursor over the header; every count is checked against the bytes left before it is believed."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def release(self) -> None:
        self._data.release()

    def read(self) -> tuple[int, dict[str, Any], list[tuple[str, tuple[int, ...], int, int]], int]:
        """Version, metadata, tensor entries (name, shape, type, relative offset), and the header's end."""
        if bytes(self._data[:4]) != b"GGUF":
            raise CheckpointError(f"{self._path}: this is not a GGUF file (it does not begin with 'GGUF').")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
                raise CheckpointError(
                    f"{self._path}: this is a big-endian GGUF file, which is not supported; use the "
                    "little-endian one, or run: gguf-convert-endian FILE little"
                )
            raise CheckpointError(
                f"{self._path}: this is GGUF version {version}, but only versions 2 and 3 can be read; "
                "get a file made by a current converter."
            )
        tensor_count, pair_count = self._number("Q"), self._number("Q")
        self._require(tensor_count * _MIN_TENSOR + pair_count * _MIN_PAIR)
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._string()
            metadata[key] = self._value(self._number("I"), nesting=0)
        infos = [self._tensor_info() for _ in range(tensor_count)]
        return version, metadata, infos, self._at

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._number("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        if not all(shape):
            raise self._damaged(f"tensor {name!r} has an empty dimension")
        return name, shape, self._number("I"), self._number("Q")

    def _value(self, kind: int, nesting: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _ARRAY and nesting < _MAX_NESTING:
            return self._array(nesting)
        raise self._damaged(f"there is a metadata value of type {kind}")

    def _array(self, nesting: int) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            return self._strings(count)
        if kind in _SCALARS:
            layout = struct.Struct(f"<{_SCALARS[kind]}")
            self._require(count * layout.size)
            begin, self._at = self._at, self._at + count * layout.size
            return [value for (value,) in layout.iter_unpack(self._data[begin : self._at])]
        self._require(count * 12)
        return [self._value(kind, nesting + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        # The loop for 150,000 tokens: everything in local names, no call per string but the two needed.
        self._require(count * 8)
        unpack, data, at, size = struct.Struct("<Q").unpack_from, self._data, self._at, self._size
        result = []
        try:
            for _ in range(count):
                (length,) = unpack(data, at)
                at += 8
                if length > size - at:
                    raise self._too_short()
                result.append(str(data[at : at + length], "utf-8"))
                at += length
        except struct.error as error:
            raise self._too_short() from error
        except UnicodeDecodeError as error:
            raise self._damaged("a string is not UTF-8") from error
        self._at = at
        return result

    def _string(self) -> str:
        return self._strings(1)[0]

    def _number(self, code: str) -> Any:
        layout = struct.Struct(f"<{code}")
        self._require(layout.size)
        (value,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return value

    def _require(self, count: int) -> None:
        if count > self._size - self._at:
            raise self._too_short(self._at + count)

    def _too_short(self, expected: int | None = None) -> CheckpointError:
        least = f"at least {expected:,} bytes are expected, but " if expected is not None else ""
        return CheckpointError(
            f"{self._path}: the header does not end within the file: {least}the actual size is "
            f"{self._size:,} bytes; {RE_DOWNLOAD}."
        )

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {what} in the header; {RE_DOWNLOAD}.")
