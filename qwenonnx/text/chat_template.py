"""Messages to prompt, through the checkpoint's own Jinja template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from qwenonnx.errors import InvalidRequestError, PackageError
from qwenonnx.text.control_text import ControlText
from qwenonnx.text.tokenizer import Tokenizer, read_tokenizer_config


@dataclass(frozen=True, slots=True)
class PromptText:
    """A rendered prompt as alternating parts: ordinary text, one control token, ordinary text and so on.

    Ordinary parts may hold text that looks like a control token, because a user typed it.
    """

    parts: tuple[str, ...]

    @property
    def text(self) -> str:
        """The prompt as one string."""
        return "".join(self.parts)


class ChatTemplate:
    """A chat template and the tokenizer it was made for. Safe to use from several threads.

    Templates see what they see in transformers: the same Jinja settings, sandbox, filters and functions. What
    users put into messages or tools never becomes a control token: only what the template itself writes does.
    """

    def __init__(self, source: str | None, tokenizer: Tokenizer, where: str = "chat template") -> None:
        """`source` None stands for a checkpoint without a template; `where` names the file in messages.

        Raises:
            PackageError: the template is no valid Jinja.
        """
        self._tokenizer = tokenizer
        self._control = ControlText(tokenizer.added_tokens)
        self._template: jinja2.Template | None = None
        if source is not None:
            try:
                self._template = _environment().from_string(source)
            except jinja2.TemplateError as error:
                raise PackageError(f"{where} is not a usable chat template ({error}); repair it there.") from error

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Takes the template from `chat_template.jinja` or else from `tokenizer_config.json`.

        Raises:
            PackageError: a file is damaged or the template is no valid Jinja.
        """
        path = folder / "chat_template.jinja"
        if path.is_file():
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise PackageError(f"{path}: cannot be read ({error}); repair or remove it.") from error
            return cls(text, tokenizer, str(path))
        config = read_tokenizer_config(folder)
        source = config.get("chat_template")
        if isinstance(source, list):  # several by name
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        where = str(folder / "tokenizer_config.json")
        return cls(source if isinstance(source, str) else None, tokenizer, where)

    @property
    def available(self) -> bool:
        """Whether the checkpoint has a template."""
        return self._template is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> PromptText:
        """Renders a conversation.

        Args:
            messages: Role and content (a string) of each turn. Arguments of tool calls may be objects or JSON
                text; JSON text is parsed, and text that is no JSON is passed as it is.
            tools: Tool definitions in OpenAI's form; an empty list counts as none.
            add_generation_prompt: Whether to open the assistant's next turn.
            continue_final_message: Whether the prompt ends with the last message's content, spaces and all,
                for the model to go on from there.
            variables: More variables for the template.

        Raises:
            InvalidRequestError: there is no template, it refuses the messages, or both flags are on.
        """
        if self._template is None:
            raise InvalidRequestError("This model has no chat template; use /v1/completions instead.", param="messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other; switch one off.",
                param="continue_final_message",
            )
        prepared = [_with_parsed_arguments(message) for message in messages]
        if continue_final_message and not (prepared and isinstance(prepared[-1].get("content"), str)):
            raise InvalidRequestError(
                "continue_final_message needs a last message with text content.", param="messages"
            )
        values = {
            **self._tokenizer.special_tokens,
            **(variables or {}),
            "messages": prepared,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            marks = self._control.unused_characters([values["messages"], values["tools"], variables])
            split_mark, end_mark = next(marks), next(marks)
            for name in ("messages", "tools", *(variables or {})):
                values[name] = self._control.break_tokens(values[name], split_mark)
            if continue_final_message:
                values["messages"][-1]["content"] += end_mark
            text = self._template.render(values)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"The model's chat template refuses these messages: {error.message or type(error).__name__}",
                param="messages",
            ) from error
        except RecursionError as error:
            raise InvalidRequestError("The messages or tools are nested too deeply.", param="messages") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # Raised by the template's own expressions, such as adding a missing content to text.
            raise InvalidRequestError(
                f"The model's chat template cannot render these messages ({error}).", param="messages"
            ) from error
        if continue_final_message:
            text, found, _ = text.rpartition(end_mark)
            if not found:
                raise InvalidRequestError(
                    "The model's chat template leaves out the last message, so that it cannot be continued.",
                    param="messages",
                )
        return PromptText(tuple(part.replace(split_mark, "") for part in self._control.split(text)))

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Renders a conversation as `render` does and encodes it.

        Raises:
            InvalidRequestError: as `render`; or a text holds half of a surrogate pair.
        """
        prompt = self.render(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        return self.encode_prompt(prompt)

    def encode_prompt(self, prompt: PromptText) -> list[int]:
        """Encodes a rendered prompt: control parts by id, ordinary parts as ordinary text.

        Raises:
            InvalidRequestError: a text holds half of a surrogate pair.
        """
        ids: list[int] = []
        for index, part in enumerate(prompt.parts):
            if index % 2:
                ids.append(self._tokenizer.added_tokens[part])
            elif part:
                ids += self._tokenizer.encode_ordinary(part)
        return ids


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as `transformers.utils.chat_template_utils` sets it up."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a message in which the arguments of tool calls are objects, as templates expect them."""
    result = dict(message)
    calls = result.get("tool_calls")
    if isinstance(calls, list | tuple):
        result["tool_calls"] = [_with_parsed_call(call) for call in calls]
    return result


def _with_parsed_call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    result = dict(call)
    if isinstance(result.get("function"), Mapping):
        result["function"] = _with_parsed_call(result["function"])
    if "arguments" in result:
        result["arguments"] = _parsed(result["arguments"])
    return result


def _parsed(arguments: Any) -> Any:
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
