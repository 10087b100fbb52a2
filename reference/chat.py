"""The chat encoding: a conversation becomes segments of text and markup (K3.md §14, §16). No tensor library.

Decided here where the specification is silent: roles are system, user, assistant and tool; a system message that
brings ``tools`` is their declaration and nothing else; text that looks like the image placeholder is text; a
``tool_choice`` that names a function adds no message, since the format has none for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reference import chat_markup
from reference.chat_markup import Segment, canonical_json, element, internal_message, markup, open_tag, plain
from reference.chat_tools import declare_tools, encode_calls, place_tool_results, tool_calls
from reference.errors import InputError

ROLES = ("system", "user", "assistant", "tool")
EFFORTS = ("low", "high", "max")
IMAGE_PARTS = ("image", "image_url")
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"
"""``image_placeholder`` of the released ``config.json``."""

EFFORT_TEXT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
CHOICE_TEXTS = {
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
}
FORMAT_TEXT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
SCHEMA_TEXT = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


def encode_conversation(
    messages: list[dict],
    tools: list[dict] | None = None,
    thinking: bool = True,
    add_generation_prompt: bool = True,
    thinking_effort: str | None = None,
    tool_choice: str | dict | None = None,
    response_format: str | dict | None = None,
    image_prompts: list[str] | None = None,
    image_placeholder: str = IMAGE_PLACEHOLDER,
) -> list[Segment]:
    """Encode a conversation as ``(text, is_markup)`` segments, to be given to ``Tokenizer.encode_segments``.

    ``messages``: objects with ``role`` and ``content`` (text, null, or a list of text and image parts), and, by role,
    ``name``, ``reasoning_content`` or ``reasoning``, ``tool_calls``, ``tool_call_id``, ``tools``.
    ``thinking_effort``: low, high or max; it is said only in thinking mode. ``tool_choice``: auto, none, required or
    ``{"type": "function", "function": {"name"}}``. ``response_format``: text, json_object, or ``{"type":
    "json_schema", "json_schema": {"schema"}}``. ``image_prompts``: the markup of each image part in the order of
    ``image_parts``; without it ``image_placeholder`` stands for each.

    Raises InputError, naming the message, for anything else, and when image prompts and image parts differ in number.
    """
    _require_flag("thinking", thinking)
    _require_flag("add_generation_prompt", add_generation_prompt)
    _check_messages(messages)
    images = _ImagePrompts(image_prompts, image_placeholder)
    segments = declare_tools(tools, "tools") if tools else []
    segments += _effort_message(thinking_effort, thinking)
    for where, message in place_tool_results(messages):
        segments += _encode_message(message, where, thinking, images)
    segments += _choice_message(tool_choice)
    segments += _format_message(response_format)
    if add_generation_prompt:
        segments += [*open_tag("message", {"role": "assistant"}), *open_tag("think" if thinking else "response")]
    images.check_all_used()
    return segments


def image_parts(messages: list[dict]) -> list[dict]:
    """The image parts in the order in which the encoding shows them, which re-ordered tool results may change.

    Pictures must be processed, and ``image_prompts`` given, in this order. Raises InputError as the encoding does.
    """
    _check_messages(messages)
    parts = (_parts(message, where) for where, message in place_tool_results(messages) if not _declares_tools(message))
    return [part for message_parts in parts for part in message_parts if part["type"] in IMAGE_PARTS]


class _ImagePrompts:
    """Hands out one image prompt per image part, or the placeholder where the caller gave no prompts."""

    def __init__(self, prompts: Any, placeholder: str) -> None:
        whole = prompts is None or isinstance(prompts, (list, tuple))
        if not whole or not all(isinstance(prompt, str) and prompt for prompt in prompts or ()):
            raise InputError(
                "image_prompts", "list", "a list of non-empty strings", repr(prompts)[:60], "one per image"
            )
        self.prompts, self.placeholder, self.used = prompts, placeholder, 0

    def next(self) -> str:
        self.used += 1
        if self.prompts is None or self.used > len(self.prompts):
            return self.placeholder
        return self.prompts[self.used - 1]

    def check_all_used(self) -> None:
        if self.prompts is not None and self.used != len(self.prompts):
            expected = f"one for each of the {self.used} image parts"
            raise InputError("image_prompts", "number", expected, len(self.prompts), "give one prompt per image part")


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, (list, tuple)):
        raise InputError("messages", "type", "a list of objects", type(messages).__name__, "give a list")
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise InputError(where, "type", "an object", type(message).__name__, 'give {"role", "content"}')
        role = message.get("role")
        if role not in ROLES:
            raise InputError(where, "role", " or ".join(ROLES), repr(role), "the format knows no other role")
        if "content" not in message and role != "assistant" and not _declares_tools(message):
            raise InputError(where, "content", "text, null or a list of parts", "no such field", "add it")


def _require_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InputError("call", name, "true or false", repr(value), "give a boolean")


def _declares_tools(message: dict) -> bool:
    return message["role"] == "system" and bool(message.get("tools"))


def _encode_message(message: dict, where: str, thinking: bool, images: _ImagePrompts) -> list[Segment]:
    if _declares_tools(message):
        return declare_tools(message["tools"], where, further=True)
    attributes = {"role": message["role"]}
    content = _encode_content(message, where, images)
    if message["role"] == "tool":
        attributes |= {"tool": message["tool"], "index": message["index"]}
    elif name := _text_field(message, "name", where):
        attributes["name"] = name
    if message["role"] == "assistant":
        content = _encode_assistant(message, where, thinking, content)
    return chat_markup.message(attributes, content)


def _encode_assistant(message: dict, where: str, thinking: bool, content: list[Segment]) -> list[Segment]:
    """``think`` in thinking mode, ``response``, and ``tools`` if there are calls. Blank reasoning is none."""
    reasoning = _text_field(message, "reasoning_content", where) or _text_field(message, "reasoning", where)
    return [
        *(element("think", None, plain(reasoning if reasoning.strip() else "")) if thinking else []),
        *element("response", None, content),
        *encode_calls(tool_calls(message, where)),
    ]


def _text_field(message: dict, field: str, where: str) -> str:
    value = message.get(field)
    if value is not None and not isinstance(value, str):
        raise InputError(where, field, "text or null", type(value).__name__, "give a string")
    return value or ""


def _encode_content(message: dict, where: str, images: _ImagePrompts) -> list[Segment]:
    segments: list[Segment] = []
    for part in _parts(message, where):
        segments += markup(images.next()) if part["type"] in IMAGE_PARTS else plain(part["text"])
    return segments


def _parts(message: dict, where: str) -> Iterator[dict]:
    """The content as checked parts; a plain string is one text part, null is none."""
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, (list, tuple)) and content is not None:
        raise InputError(where, "content", "text, null or a list of parts", type(content).__name__, "give one of these")
    for number, part in enumerate(content or ()):
        place = f"{where}.content[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" and kind not in IMAGE_PARTS:
            raise InputError(place, "type", "text, image or image_url", repr(kind), "the format knows no other part")
        if kind == "text" and not isinstance(part.get("text"), str):
            raise InputError(place, "text", "a string", type(part.get("text")).__name__, "give the text")
        yield part


def _effort_message(effort: str | None, thinking: bool) -> list[Segment]:
    if effort is None:
        return []
    if effort not in EFFORTS:
        raise InputError("call", "thinking_effort", " or ".join(EFFORTS), repr(effort), "choose one or leave it out")
    return internal_message("thinking-effort", EFFORT_TEXT.replace("{}", effort)) if thinking else []


def _choice_message(choice: str | dict | None) -> list[Segment]:
    if isinstance(choice, str) and choice in CHOICE_TEXTS:
        return internal_message("tool-choice", CHOICE_TEXTS[choice])
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    if choice is None or choice == "auto" or named:
        return []
    expected = 'auto, none, required or {"type": "function", "function": {"name"}}'
    raise InputError("call", "tool_choice", expected, repr(choice)[:60], "choose one or leave it out")


def _format_message(given: str | dict | None) -> list[Segment]:
    kind = given.get("type") if isinstance(given, dict) else given
    if given is None or kind == "text":
        return []
    if kind == "json_object":
        return internal_message("response-format", FORMAT_TEXT.replace("{}", kind))
    if kind != "json_schema":
        expected = "text, json_object or json_schema"
        raise InputError("call", "response_format", expected, repr(given)[:60], "choose one or leave it out")
    schema = canonical_json(_schema(given), "response_format")
    return internal_message("response-format", FORMAT_TEXT.replace("{}", kind) + SCHEMA_TEXT.replace("{}", schema))


def _schema(given: str | dict) -> dict:
    """The schema under ``json_schema.schema``, or ``json_schema`` itself where it holds no such field."""
    outer = given.get("json_schema") if isinstance(given, dict) else None
    schema = outer.get("schema", outer) if isinstance(outer, dict) else None
    if not isinstance(schema, dict):
        expected = '{"type": "json_schema", "json_schema": {"schema": object}}'
        raise InputError("call", "response_format", expected, repr(given)[:60], "add the schema")
    return schema
