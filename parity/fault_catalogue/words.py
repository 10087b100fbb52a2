"""Faults of the tokenizer and of the chat encoding (K3.md §13, §14)."""

from __future__ import annotations

import json
from typing import Any

from parity.fault_catalogue.patches import around, given, instead, result
from parity.faults import Fault
from reference.tokenizer import SPLIT_ALTERNATIVES


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


def split_by(*alternatives: str) -> dict[str, str]:
    return {"tokenizer.SPLIT_PATTERN": "|".join(alternatives)}


HAN, CAPITALS_LAST, CAPITALS_FIRST, DIGITS, *MARKS_AND_SPACES = SPLIT_ALTERNATIVES


def without_han(pattern: str) -> str:
    """Letters with Han among them, which the pattern takes out."""
    return pattern.replace(r"&&[^\p{Han}]", "")


def segments_joined(original: Any, package: str, self, segments) -> list[int]:
    """Neighbours of one kind as one text."""
    joined: list[tuple[str, bool]] = []
    for text, markup in segments:
        if joined and joined[-1][1] == markup:
            joined[-1] = (joined[-1][0] + text, markup)
        else:
            joined.append((text, markup))
    return original(self, joined)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "F103",
        "tokenizer",
        "the split pattern may be cut out of the source, empty alternatives and all",
        "text is lost, or a crash",
        numbers=split_by(HAN, "", CAPITALS_LAST, CAPITALS_FIRST, "", DIGITS, *MARKS_AND_SPACES),
    ),
    Fault(
        "F104",
        "tokenizer",
        "text is encoded whole, however long",
        "other ids where a run passes 25,000 characters",
        numbers={"tokenizer.RUN_CHARACTERS": 10**9},
    ),
    Fault(
        "F105",
        "tokenizer",
        "the ids of a conversation are those of its text",
        "other ids where two pieces meet",
        {"tokenizer.Tokenizer.encode_segments": around(segments_joined)},
    ),
    Fault(
        "F106",
        "tokenizer",
        "Han are letters like others",
        "words of two scripts are cut elsewhere",
        numbers=split_by(without_han(CAPITALS_LAST), without_han(CAPITALS_FIRST), DIGITS, *MARKS_AND_SPACES),
    ),
    Fault(
        "F106b",
        "tokenizer",
        "contractions are written small",
        "I'LL is cut elsewhere",
        numbers={"tokenizer.SPLIT_PATTERN": "|".join(SPLIT_ALTERNATIVES).replace("(?i:", "(?:")},
    ),
    Fault(
        "F106c",
        "tokenizer",
        "digits stand alone",
        "numbers become longer",
        numbers=split_by(HAN, CAPITALS_LAST, CAPITALS_FIRST, r"\p{N}", *MARKS_AND_SPACES),
    ),
    Fault(
        "F106d",
        "tokenizer",
        "a word is letters of any case",
        "words are not cut where small letters end",
        numbers=split_by(HAN, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}&&[^\p{Han}]]+", DIGITS, *MARKS_AND_SPACES),
    ),
    Fault(
        "F107c",
        "tokenizer",
        "special names in any text are special ids",
        "user text forges control tokens",
        {"tokenizer.Tokenizer.encode_segments": given(segments=lambda given: [(text, True) for text, _ in given])},
    ),
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
