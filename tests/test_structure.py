"""Who may import whom, and what stays out of where."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import qwenonnx

ROOT = Path(qwenonnx.__file__).parent
RANKS = (
    ("errors",),
    ("config", "files"),
    ("checkpoint", "text", "package"),
    ("graph",),
    ("runtime",),
    ("evaluate",),
    ("pull", "export", "adopt", "quantize", "engine"),
    ("server", "bench"),
    ("cli",),
    ("__main__",),
)
"""Parts of the program from the ground up; each imports only from those above it in this list."""
MAX_LINES = 300
FORBIDDEN = ("torch", "optimum", "tensorflow")
TORCH_EXTRA = ROOT / "export" / "torch_extra.py"
"""The one file that may import them, inside functions: what needs the extra `optimum`."""
WRITERS = (
    "qwenonnx.export",
    "qwenonnx.adopt",
    "qwenonnx.quantize",
    "qwenonnx.checkpoint",
    "onnx",
    "transformers",
    "torch",
)
"""What serving a package has no use for."""
IMPORT_ALL = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps([*sys.modules]))
"""

rank_of = {part: rank for rank, parts in enumerate(RANKS) for part in parts}
modules = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = ("qwenonnx", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(name: str) -> str:
    return name.split(".")[1]


def imports(path: Path) -> set[str]:
    """Names of all modules that a file imports, inside functions and for type checking too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found.add(node.module)
            # `from qwenonnx.package import manifest` imports a module as well.
            found.update(
                f"{node.module}.{alias.name}"
                for alias in node.names
                if (ROOT.parent / Path(*node.module.split("."), f"{alias.name}.py")).exists()
            )
    return found


def matches(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def loaded_by(*names: str) -> set[str]:
    """Modules in memory after a new process has imported the given ones."""
    command = [sys.executable, "-c", IMPORT_ALL, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return set(json.loads(done.stdout))


def test_every_part_has_a_rank() -> None:
    found = {part_of(name_of(path)) for path in modules if path.parent != ROOT or path.stem != "__init__"}

    assert found == set(rank_of)


@pytest.mark.parametrize("path", modules, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    if path == ROOT / "__init__.py":
        assert not {name for name in imports(path) if name.startswith("qwenonnx")}
        return
    part = part_of(name_of(path))
    for name in imports(path):
        if name.startswith("qwenonnx.") and part_of(name) != part:
            assert rank_of[part_of(name)] < rank_of[part], f"{name_of(path)} imports {name}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {name_of(path) for path in modules}
    graph = {name_of(path): {name for name in imports(path) if name in names} for path in modules}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for following in sorted(graph[name] - {name}):
                visit(following, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


@pytest.mark.parametrize("path", modules, ids=name_of)
def test_modules_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", [path for path in modules if path != TORCH_EXTRA], ids=name_of)
def test_nothing_needs_a_training_framework(path: Path) -> None:
    assert not [name for name in imports(path) if matches(name, FORBIDDEN)]


def test_torch_is_imported_inside_functions_of_one_file() -> None:
    found = loaded_by(name_of(TORCH_EXTRA))

    assert {"torch", "optimum.exporters.onnx"} <= imports(TORCH_EXTRA)
    assert not [name for name in found if matches(name, FORBIDDEN)]


@pytest.mark.parametrize(
    "path",
    [*ROOT.glob("text/*.py"), ROOT / "engine" / "scheduler.py", ROOT / "engine" / "sampler.py"],
    ids=name_of,
)
def test_text_scheduling_and_sampling_know_no_onnxruntime(path: Path) -> None:
    assert not [name for name in imports(path) if matches(name, ("onnxruntime", "onnx"))]


def test_serving_loads_nothing_that_only_writes_packages() -> None:
    names = [name_of(path) for part in ("server", "engine", "runtime") for path in sorted(ROOT.glob(f"{part}/*.py"))]

    found = loaded_by(*names)

    assert set(names) <= found
    assert sorted(name for name in found if matches(name, WRITERS)) == []


def test_exporting_loads_no_server() -> None:
    names = [
        name_of(path)
        for part in ("export", "adopt", "quantize", "checkpoint")
        for path in sorted(ROOT.glob(f"{part}/*.py"))
    ]

    found = loaded_by(*names)

    assert (
        sorted(name for name in found if matches(name, ("qwenonnx.server", "qwenonnx.engine", "fastapi", "torch")))
        == []
    )
