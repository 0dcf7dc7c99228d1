"""What the documentation promises exists: commands, options, make targets, files, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qwenonnx.cli.main import app
from qwenonnx.pull.catalog import ENTRIES
from qwenonnx.quantize.recipes import RECIPES

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "models/README.md",
    *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
]
COMMAND = re.compile(r"qwenonnx (pull|export|quantize|eval|serve|chat|bench|inspect|tune|adopt|verify)\b([^`|#\n]*)")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_and_their_options_exist(name: str) -> None:
    runner = CliRunner()
    for command, rest in COMMAND.findall(text_of(name)):
        help_text = runner.invoke(app, [command, "--help"])
        assert help_text.exit_code == 0, f"{name}: `qwenonnx {command}` does not exist"
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest):
            assert option in help_text.output, f"{name}: `qwenonnx {command}` has no {option}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_make_targets_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    mentioned = set(re.findall(r"(?:^|`| )make ([a-z-]+)(?=`|\s*$|  )", text_of(name), re.MULTILINE))
    assert mentioned <= targets


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_to_files_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", text_of(name)):
        if not target.startswith(("http://", "https://")):
            assert (ROOT / name).parent.joinpath(target).exists(), f"{name} links to {target}"


def test_every_command_is_in_the_readme() -> None:
    commands = {command.name for command in app.registered_commands} | {
        command.callback.__name__ for command in app.registered_commands if command.name is None and command.callback
    }
    mentioned = {command for command, _ in COMMAND.findall(text_of("README.md"))}
    assert {name for name in commands if name} <= mentioned


def test_the_known_models_of_the_readme_are_those_of_the_catalog() -> None:
    _, _, rest = text_of("README.md").partition("or a known name:")
    listed = rest.partition(". ")[0]
    assert re.findall(r"`([^`]+)`", listed) == [entry.name for entry in ENTRIES]


def test_the_recipes_of_the_readme_are_those_of_the_command() -> None:
    (row,) = (line for line in text_of("README.md").splitlines() if line.startswith("| `qwenonnx quantize"))
    assert {f"`{name}`" for name in RECIPES} <= set(re.findall(r"`[^`]+`", row))


def test_every_make_target_explains_itself() -> None:
    makefile = text_of("Makefile")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    for target in phony.group(1).split():
        assert re.search(rf"^{target}:.*## \S", makefile, re.MULTILINE), target


def test_the_version_is_the_same_everywhere() -> None:
    from qwenonnx import __version__

    result = CliRunner().invoke(app, ["--version"])
    assert result.output.strip() == f"qwenonnx {__version__}"
