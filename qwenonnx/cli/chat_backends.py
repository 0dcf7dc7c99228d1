"""What `qwenonnx chat` talks to: a package in this process, or a server."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

from qwenonnx.engine.load import LoadedModel
from qwenonnx.errors import QwenonnxError, UsageError

Message = dict[str, str]
CONNECT_SECONDS = 600.0
_ADDRESS = re.compile(r"[\w.-]+:\d+(/|$)")


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Options of the command that reach the model."""

    max_tokens: int | None
    temperature: float
    api_key: str | None
    threads: int | None


class ChatBackend(Protocol):
    """Something that answers a conversation."""

    def reply(self, messages: list[Message]) -> Generator[str, None, str | None]:
        """The answer in pieces, then why it ended (`stop`, `length`); closing the generator stops it."""


@contextlib.contextmanager
def open_backend(target: str, settings: ChatSettings) -> Iterator[ChatBackend]:
    """A backend for a package's folder or a server's address.

    Raises:
        UsageError: it is an address without http://.
        QwenonnxError: the package cannot be loaded.
    """
    if target.startswith(("http://", "https://")):
        yield ServerBackend(target, settings)
        return
    folder = Path(target)
    if _ADDRESS.match(target) and not folder.exists():
        raise UsageError(f"{target}: no such folder; did you mean http://{target}?")
    from qwenonnx.cli.packages import open_package
    from qwenonnx.engine.config import EngineConfig
    from qwenonnx.engine.load import load_model
    from qwenonnx.runtime.load import session_config

    model = load_model(open_package(folder), session_config(settings.threads), engine=EngineConfig.for_one())
    model.engine.start()
    try:
        yield PackageBackend(model, settings)
    finally:
        model.engine.close()


class PackageBackend:
    """Answers with a model loaded in this process."""

    def __init__(self, model: LoadedModel, settings: ChatSettings) -> None:
        self._model = model
        self._settings = settings

    def reply(self, messages: list[Message]) -> Generator[str, None, str | None]:
        """The answer in pieces, then why it ended."""
        from qwenonnx.engine.request import Delta, Failed, Finished, GenerationRequest
        from qwenonnx.engine.sampling import SamplingParams

        request = GenerationRequest(
            prompt_ids=tuple(self._model.chat_template.encode(messages)),
            sampling=SamplingParams(temperature=self._settings.temperature),
            max_tokens=self._settings.max_tokens,
        )
        with self._model.engine.generate(request) as events:
            for event in events:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Delta) and event.text:
                    yield event.text
                if isinstance(event, Finished):
                    return event.reason
        return None


class ServerBackend:
    """Answers through a server's /v1/chat/completions."""

    def __init__(self, url: str, settings: ChatSettings) -> None:
        base = url.rstrip("/")
        self._url = f"{base if base.endswith('/v1') else base + '/v1'}/chat/completions"
        self._settings = settings

    def reply(self, messages: list[Message]) -> Generator[str, None, str | None]:
        """The answer in pieces, then why it ended."""
        body: dict[str, Any] = {
            "messages": messages,
            "stream": True,
            "temperature": self._settings.temperature,
        }
        if self._settings.max_tokens is not None:
            body["max_tokens"] = self._settings.max_tokens
        headers = {"Content-Type": "application/json"}
        if self._settings.api_key:
            headers["Authorization"] = f"Bearer {self._settings.api_key}"
        reason: str | None = None
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=CONNECT_SECONDS) as response:
                for line in response:
                    if not line.startswith(b"data: "):
                        continue
                    data = line.removeprefix(b"data: ").strip()
                    if data == b"[DONE]":
                        return reason
                    reason = (yield from _content(json.loads(data))) or reason
        except urllib.error.HTTPError as error:
            remedy = (
                "; give its key with --api-key or QWENONNX_API_KEY" if error.code == HTTPStatus.UNAUTHORIZED else ""
            )
            raise QwenonnxError(f"{self._url}: the server refused ({_reason(error)}){remedy}.") from error
        except (urllib.error.URLError, OSError) as error:
            raise QwenonnxError(f"{self._url}: no answer ({error}); is the server running?") from error
        except ValueError as error:
            raise QwenonnxError(f"{self._url}: the answer cannot be read ({error}).") from error
        raise QwenonnxError(f"{self._url}: the answer broke off, or this is no server with the OpenAI API.")


def _content(chunk: dict[str, Any]) -> Generator[str, None, str | None]:
    if "error" in chunk:
        raise QwenonnxError(f"the server failed: {chunk['error'].get('message')}")
    reason: str | None = None
    for choice in chunk.get("choices", []):
        if text := choice.get("delta", {}).get("content"):
            yield text
        reason = choice.get("finish_reason") or reason
    return reason


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"
