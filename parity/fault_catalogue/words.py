"""Faults of the chat encoding (K3.md §14)."""

from __future__ import annotations

import json
from typing import Any

from parity.fault_catalogue.patches import given, instead, result
from parity.faults import Fault


def as_markup(segments: Any, package: str) -> Any:
    return [(text, True) for text, _ in segments]


def unsorted_json(package: str, value, where) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def in_ascii(text: str, package: str) -> str:
    return "".join(sign if sign.isascii() else json.dumps(sign)[1:-1] for sign in text)


def as_they_came(package: str, run, calls, done) -> Any:
    """A run of tool results in its own order, each under the name of the call at its place."""
    for index, (where, message) in enumerate(run, done + 1):
        name = calls[index - 1].name if index <= len(calls) else message.get("name")
        yield where, {**message, "tool": name, "index": str(index)}


FAULTS: tuple[Fault, ...] = (
    Fault(
        "F107",
        "chat",
        "the whole prompt may be encoded with special tokens allowed",
        "user text forges control tokens",
        {"chat_markup.plain": result(as_markup)},
    ),
    Fault(
        "F107b",
        "chat",
        "attribute values need no escaping",
        "a quote in a name ends the attribute",
        {"chat_markup.escaped": instead(lambda package, value: value)},
    ),
    Fault(
        "F108",
        "chat",
        "the order of keys in a tool's schema does not matter",
        "another prompt for the same tools",
        {"chat_markup.canonical_json": instead(unsorted_json)},
    ),
    Fault(
        "F108b",
        "chat",
        "JSON is written in ASCII",
        "other tokens for every other script",
        {"chat_markup.canonical_json": result(in_ascii), "chat_markup.argument_json": result(in_ascii)},
    ),
    Fault(
        "F109",
        "chat",
        "earlier thinking is not part of the conversation",
        "another prompt after the first answer",
        {"chat._encode_message": given(thinking=False)},
    ),
    Fault(
        "F110",
        "chat",
        "every argument of a call is a string",
        "arguments of the wrong type",
        {"chat_tools.json_type": instead(lambda package, *args: "string")},
    ),
    Fault(
        "F110b",
        "chat",
        "tool results stand in the order in which they came",
        "results under other calls' names",
        {"chat_tools._place_run": instead(as_they_came)},
    ),
    Fault(
        "F110c",
        "chat",
        "the effort of thinking is a matter of sampling",
        "a message is missing",
        {"chat._effort_message": instead(lambda package, *args: [])},
    ),
)
