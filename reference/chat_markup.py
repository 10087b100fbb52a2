"""The pieces of the chat markup: segments, elements, messages (K3.md §14, §16). No tensor library.

A segment is ``(text, is_markup)``. Only markup segments may become special ids, and only this file makes them; every
piece of an element is a segment of its own and empty text gives none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from reference.errors import InputError

Segment = tuple[str, bool]
Attributes = Mapping[str, str]

OPEN, CLOSE, SEPARATOR, END_OF_MESSAGE = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"


def markup(text: str) -> list[Segment]:
    """One segment that may yield special ids; none for empty text."""
    return [(text, True)] if text else []


def plain(text: str) -> list[Segment]:
    """One segment that never yields a special id; none for empty text."""
    return [(text, False)] if text else []


def escaped(value: str) -> str:
    """An attribute value: ``&`` -> ``&amp;``, ``"`` -> ``&quot;``, and nothing else."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def open_tag(tag: str, attributes: Attributes | None = None) -> list[Segment]:
    """``<|open|>`` tag, then `` key`` ``="`` value ``"`` per attribute, then ``<|sep|>``."""
    segments = [*markup(OPEN), *plain(tag)]
    for key, value in (attributes or {}).items():
        segments += [*plain(f" {key}"), *plain('="'), *plain(escaped(value)), *plain('"')]
    return [*segments, *markup(SEPARATOR)]


def close_tag(tag: str) -> list[Segment]:
    """``<|close|>`` tag ``<|sep|>``."""
    return [*markup(CLOSE), *plain(tag), *markup(SEPARATOR)]


def element(tag: str, attributes: Attributes | None, body: Iterable[Segment]) -> list[Segment]:
    """An opened tag, its body, the closed tag."""
    return [*open_tag(tag, attributes), *body, *close_tag(tag)]


def message(attributes: Attributes, body: Iterable[Segment]) -> list[Segment]:
    """A ``message`` element and ``<|end_of_msg|>``."""
    return [*element("message", attributes, body), *markup(END_OF_MESSAGE)]


def internal_message(kind: str, text: str) -> list[Segment]:
    """A system message of the format's own: ``kind`` is its ``type`` attribute."""
    return message({"role": "system", "type": kind}, plain(text))


def canonical_json(value: Any, where: str) -> str:
    """Compact JSON with sorted keys, as tools and schemas are written."""
    return _json(value, where, sort_keys=True, separators=(",", ":"))


def argument_json(value: Any, where: str) -> str:
    """JSON with Python's default spacing and the given key order, as argument values are written."""
    return _json(value, where)


def _json(value: Any, where: str, **layout: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, **layout)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(where, "value", "plain JSON data", error, "give strings, numbers, lists, objects") from None
