"""One safetensors file: a checked header over a memory map.

The format (https://github.com/huggingface/safetensors#format) is 8 bytes of header length, little endian, a
JSON header, and the tensors one after the other without gaps.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenonnx.checkpoint.weight_files import RE_DOWNLOAD, map_file, release_pages
from qwenonnx.errors import CheckpointError

_MAX_HEADER = 100_000_000  # the reference implementation's limit
_ITEM_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `begin` and `end` are offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A safetensors file whose header has been read and found to agree with the file's size.

    Raises:
        CheckpointError: the file is damaged; the message has its name, the expected and the actual size.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        self.entries = self._read_header()

    def _read_header(self) -> dict[str, TensorEntry]:
        size = len(self._map)
        length = struct.unpack("<Q", self._map[:8])[0] if size >= 8 else _MAX_HEADER
        if length > _MAX_HEADER or 8 + length > size:
            claim = f"a header of {length:,} bytes is announced" if size >= 8 else "there is no header"
            raise CheckpointError(
                f"{self.path}: {claim}, so at least {8 + length:,} bytes are expected, but the file has "
                f"{size:,}; {RE_DOWNLOAD}."
            )
        try:
            header = json.loads(self._map[8 : 8 + length].decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: the header is not JSON; {RE_DOWNLOAD}.") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.path}: the header is not a JSON object; {RE_DOWNLOAD}.")
        start = 8 + length
        entries = {name: self._entry(name, value, start) for name, value in header.items() if name != "__metadata__"}
        position = start
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != position:
                raise CheckpointError(
                    f"{self.path}: tensor {name} starts at byte {entry.begin:,} of the file where "
                    f"{position:,} is due; {RE_DOWNLOAD}."
                )
            position = entry.end
        if position != size:
            raise CheckpointError(
                f"{self.path}: the header describes a file of {position:,} bytes (expected size), but the "
                f"actual size is {size:,}; {RE_DOWNLOAD}."
            )
        return entries

    def _entry(self, name: str, value: Any, start: int) -> TensorEntry:
        try:
            dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
            sound = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
            bits = _ITEM_BITS.get(dtype)
        except (KeyError, TypeError, ValueError):
            sound, bits = False, None
        if not sound:
            raise CheckpointError(f"{self.path}: the header's entry for tensor {name} is malformed; {RE_DOWNLOAD}.")
        # A type of unknown width is refused only if that tensor turns out to be needed.
        if bits is not None and (end - begin) * 8 != math.prod(shape) * bits:
            raise CheckpointError(
                f"{self.path}: tensor {name} of shape {list(shape)} in {dtype} is given {end - begin:,} "
                f"bytes; {RE_DOWNLOAD}."
            )
        if end < begin:
            raise CheckpointError(f"{self.path}: tensor {name} ends before it begins; {RE_DOWNLOAD}.")
        return TensorEntry(dtype, shape, start + begin, start + end)

    def raw(self, name: str) -> memoryview:
        """The tensor's bytes in the map, without a copy."""
        entry = self.entries[name]
        return memoryview(self._map)[entry.begin : entry.end]

    def read(self, name: str) -> NDArray[np.float32]:
        """A tensor of type F32, F16 or BF16 as fp32 in memory of its own.

        Raises:
            CheckpointError: the tensor has another type.
        """
        entry = self.entries[name]
        result = np.empty(entry.shape, np.float32)
        flat = result.reshape(-1)
        if entry.dtype == "F32":
            flat[:] = np.frombuffer(self.raw(name), "<f4")
        elif entry.dtype == "F16":
            flat[:] = np.frombuffer(self.raw(name), "<f2")
        elif entry.dtype == "BF16":
            # bfloat16 is the upper half of an fp32.
            np.left_shift(np.frombuffer(self.raw(name), "<u2"), 16, out=flat.view(np.uint32), dtype=np.uint32)
        else:
            raise CheckpointError(
                f"{self.path}: tensor {name} is stored as {entry.dtype}, which cannot be read as fp32."
            )
        release_pages(self._map)
        return result
