"""Options of `qwenonnx serve` that become the server's configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qwenonnx.cli.main import app
from qwenonnx.package.package import Package
from qwenonnx.server.config import ServeConfig
from qwenonnx.server.served import Served


@pytest.fixture
def configure(tiny_fp32: Package, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServeConfig]:
    """Runs the command up to the point where it would listen; returns what the server was told."""
    seen: list[ServeConfig] = []

    def run(load: Callable[[], Served], config: ServeConfig) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr("qwenonnx.server.run.serve", run)

    def invoke(*options: str, env: dict[str, str] | None = None) -> ServeConfig:
        result = CliRunner().invoke(app, ["serve", str(tiny_fp32.folder), *options], env=env)
        assert result.exit_code == 0, result.output
        return seen.pop()

    return invoke


def test_the_defaults_are_those_of_the_configuration(configure: Callable[..., ServeConfig]) -> None:
    assert configure() == ServeConfig()


def test_keys_come_from_options_a_file_and_the_environment(
    configure: Callable[..., ServeConfig], tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text("three\n# not this\nfour\n", encoding="utf-8")
    env = {"QWENONNX_API_KEY": "five six"}
    assert configure("--api-key", "one", "--api-key", "two", "--api-key-file", str(path)).api_keys == (
        *("one", "two", "three", "four"),
    )
    assert configure("--api-key-file", str(path), env=env).api_keys == ("five", "six", "three", "four")
    assert configure("--api-key", "one", env=env).api_keys == ("one",)


def test_limits_and_policies(configure: Callable[..., ServeConfig]) -> None:
    config = configure(
        *("--rate-limit", "30", "--last-turns", "8", "--max-messages", "100", "--max-tokens-default", "256"),
        *("--cors-origin", "https://a.example", "--cors-origin", "https://b.example", "--host", "0.0.0.0"),
    )
    assert (config.requests_per_minute, config.last_turns) == (30, 8)
    assert (config.max_messages, config.max_tokens_default) == (100, 256)
    assert config.cors_origins == ("https://a.example", "https://b.example")
    assert config.host == "0.0.0.0"
