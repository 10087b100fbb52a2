"""Tools in the chat encoding: declarations, calls, results (K3.md §14, §16). No tensor library.

A message's ``tool_calls`` entry is ``{"id", "function": {"name", "arguments"}}``, or the same without the inner
``function`` object. ``arguments`` is an object, or a string of JSON as Python's ``json`` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

from reference.chat_markup import Segment, argument_json, canonical_json, element, internal_message, plain
from reference.errors import InputError

FIRST_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
FURTHER_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
    "```json\n{}\n```"
)

Placed = tuple[str, dict]
"""Where a message stands in the caller's list ("messages[3]"), and the message."""


class Call(NamedTuple):
    """One tool call of an assistant message. ``arguments`` is a string where it is not valid JSON."""

    where: str
    id: str | None
    name: str
    arguments: dict[str, Any] | str


def declare_tools(tools: Any, where: str, further: bool = False) -> list[Segment]:
    """The ``tool-declare`` message; ``further`` chooses the form for tools that a later system message brings."""
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(where, "tools", "a list of objects", _kind(tools), "give one JSON object per tool")
    declaration = canonical_json(list(tools), where)
    return internal_message("tool-declare", (FURTHER_TOOLS if further else FIRST_TOOLS).replace("{}", declaration))


def tool_calls(message: dict, where: str) -> list[Call]:
    """The calls of an assistant message; none if ``tool_calls`` is absent, null or empty."""
    given = message.get("tool_calls") or []
    if not isinstance(given, (list, tuple)):
        raise InputError(where, "tool_calls", "a list", _kind(given), "give one object per call")
    return [_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(given)]


def _call(call: Any, where: str) -> Call:
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise InputError(
            where, "function.name", "the tool's name", _kind(name), 'give {"function": {"name", "arguments"}}'
        )
    return Call(where, _id(call.get("id")), name, _arguments(function.get("arguments"), where))


def _arguments(given: Any, where: str) -> dict[str, Any] | str:
    """An object, or the caller's own string if it is no JSON; nothing at all, or a blank string, means no arguments."""
    value = given
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except json.JSONDecodeError:
            return given
        except (ValueError, RecursionError) as error:  # legal JSON that Python cannot hold
            raise InputError(where, "arguments", "JSON of ordinary size", error, "shorten the arguments") from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InputError(where, "arguments", "a JSON object or a string of one", _kind(value), "name every argument")
    return value


def encode_calls(calls: list[Call]) -> list[Segment]:
    """The ``tools`` element, calls numbered from 1; nothing without calls."""
    if not calls:
        return []
    encoded = (segment for number, call in enumerate(calls, 1) for segment in _encode_call(call, number))
    return element("tools", None, encoded)


def _encode_call(call: Call, number: int) -> list[Segment]:
    attributes = {"tool": call.name, "index": str(number)}
    if isinstance(call.arguments, str):
        return element("call", attributes, element("json", {"type": "object"}, plain(call.arguments)))
    arguments = (_encode_argument(key, value, f"{call.where}.arguments") for key, value in call.arguments.items())
    return element("call", attributes, [segment for argument in arguments for segment in argument])


def _encode_argument(key: str, value: Any, where: str) -> list[Segment]:
    text = value if isinstance(value, str) else argument_json(value, where)
    return element("argument", {"key": key, "type": json_type(value, where)}, plain(text))


def json_type(value: Any, where: str = "value") -> str:
    """The ``type`` attribute: string, number, boolean, null, object or array."""
    if value is None:
        return "null"
    # bool before number: in Python a bool is an int
    kinds = {"string": str, "boolean": bool, "number": (int, float), "object": dict, "array": (list, tuple)}
    for name, types in kinds.items():
        if isinstance(value, types):
            return name
    raise InputError(where, "value", "plain JSON data", _kind(value), "give strings, numbers, lists, objects")


def place_tool_results(messages: list[dict]) -> list[Placed]:
    """The messages in the order in which they are encoded, tool messages with their ``tool`` and ``index`` filled in.

    A run of tool messages takes the order of the preceding assistant message's calls if every one of its
    ``tool_call_id`` names such a call. Otherwise it stays as it is, and a result's tool is the one it names itself
    (``tool`` or ``name``) or else that of the call at its position. ``index`` counts results from 1 after each
    assistant message. Raises InputError for a result that has no tool by any of these.
    """
    placed: list[Placed] = []
    calls: list[Call] = []
    done = 0
    numbered = [(f"messages[{number}]", message) for number, message in enumerate(messages)]
    for is_result, run in groupby(numbered, key=lambda entry: entry[1]["role"] == "tool"):
        if is_result:
            results = list(_place_run(list(run), calls, done))
            done += len(results)
            placed += results
            continue
        for where, message in run:
            if message["role"] == "assistant":
                calls, done = tool_calls(message, where), 0
            placed.append((where, message))
    return placed


def _place_run(run: list[Placed], calls: list[Call], done: int) -> Iterator[Placed]:
    first_place: dict[str | None, int] = {}
    for place, call in enumerate(calls):
        first_place.setdefault(call.id, place)
    first_place.pop(None, None)
    ids = [_id(result.get("tool_call_id")) for _, result in run]
    matched = all(id in first_place for id in ids)
    if matched:
        places = [first_place[id] for id in ids]
        order = sorted(range(len(run)), key=places.__getitem__)
        run, names = [run[i] for i in order], [calls[places[i]].name for i in order]
    else:
        names = [_own_or_positional_name(result, where, calls, done + i) for i, (where, result) in enumerate(run)]
    for index, ((where, result), name) in enumerate(zip(run, names, strict=True), done + 1):
        yield where, {**result, "tool": name, "index": str(index)}


def _own_or_positional_name(result: dict, where: str, calls: list[Call], place: int) -> str:
    name = result.get("tool") or result.get("name") or (calls[place].name if place < len(calls) else None)
    if isinstance(name, str):
        return name
    expected = "a tool_call_id, a name, or a preceding call at its position"
    raise InputError(where, "tool result", expected, _kind(name), "say which tool it comes from")


def _id(value: Any) -> str | None:
    """Ids are compared as text; null and empty ones name nothing."""
    return None if value is None or value == "" else str(value)


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
