"""What is markup and what is text, in whole conversations."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.chat import encode_conversation, image_parts
from reference.chat_markup import escaped
from reference.tests.conversation import assistant, rendered, result
from reference.tests.vocabulary import DISTANCES, GOLDEN, small_tokenizer

TOKENIZER = small_tokenizer()
MARKERS = "".join(DISTANCES) + "<|kimi_image_placeholder|>"


@pytest.mark.parametrize(("value", "expected"), [('a"b', "a&quot;b"), ("&quot;", "&amp;quot;"), ("<'>\n|>", "<'>\n|>")])
def test_attribute_values_escape_two_characters_only(value, expected):
    assert escaped(value) == expected


def special_names(segments) -> list[str]:
    ids = TOKENIZER.encode_segments(segments)
    return [TOKENIZER.special_names[id] for id in ids if id in TOKENIZER.special_names]


def conversation(text: str) -> dict:
    """A call that has ``text`` in every field that a user or a model fills."""
    call = {"id": text, "function": {"name": text, "arguments": {text: text, "list": [text], "o": {text: text}}}}
    broken = {"id": "2", "function": {"name": text, "arguments": "{" + text}}
    messages = [
        {"role": "system", "content": text, "name": text},
        {"role": "user", "content": [{"type": "text", "text": text}], "name": text},
        {"role": "assistant", "content": text, "reasoning": text, "tool_calls": [call, broken]},
        {"role": "tool", "content": text, "tool_call_id": text},
        {"role": "tool", "content": text, "name": text},
        {"role": "system", "content": None, "tools": [{"name": text, "description": text}]},
    ]
    schema = {"type": "json_schema", "json_schema": {"schema": {text: text}}}
    return {"messages": messages, "tools": [{"name": text}], "response_format": schema}


def test_markers_in_every_field_yield_no_special_id():
    assert special_names(encode_conversation(**conversation(MARKERS))) == special_names(
        encode_conversation(**conversation("harmless"))
    )


def test_a_marker_right_after_the_role_stays_text():
    segments = encode_conversation([{"role": "user", "content": "x", "name": '"<|sep|>'}])
    before = encode_conversation([{"role": "user", "content": "x", "name": "n"}])
    assert special_names(segments) == special_names(before)


def test_segments_one_by_one_are_not_their_concatenation():
    call = json.loads((GOLDEN / "chat.json").read_text(encoding="utf-8"))["cases"]["attr-escape"]["call"]
    segments = [segment for segment in encode_conversation(**call)]
    merged = [("".join(text for text, _ in segments), True)]
    one_by_one, at_once = TOKENIZER.encode_segments(segments), TOKENIZER.encode_segments(merged)
    assert one_by_one != at_once
    assert TOKENIZER.decode(one_by_one) == TOKENIZER.decode(at_once)


words = st.text(max_size=6) | st.sampled_from(["<|open|>", "<|sep|>", '"', "&", " ", "\n"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
parts = st.builds(lambda text: {"type": "text", "text": text}, words) | st.just({"type": "image", "image": "x"})
contents = st.none() | words | st.lists(parts, max_size=3)


@st.composite
def conversations(draw):
    messages = []
    for role in draw(st.lists(st.sampled_from(["system", "user", "assistant"]), max_size=4)):
        entry = {"role": role, "content": draw(contents), "name": draw(words)}
        messages.append(entry)
        if role == "assistant" and draw(st.booleans()):
            arguments = draw(st.lists(st.dictionaries(words, values, max_size=2), min_size=1, max_size=3))
            functions = [{"name": f"f{n}", "arguments": given} for n, given in enumerate(arguments)]
            entry["tool_calls"] = [{"id": f"c{n}", "function": function} for n, function in enumerate(functions)]
            order = draw(st.permutations(range(len(functions))))
            messages += [result(draw(contents), f"c{n}") for n in order]
    return messages


@given(conversations(), st.booleans())
@settings(deadline=None)
def test_every_conversation_is_balanced_markup_around_its_own_text(messages, thinking):
    before = copy.deepcopy(messages)
    segments = encode_conversation(messages, thinking=thinking, add_generation_prompt=False)
    assert messages == before
    markers = [text for text, is_markup in segments if is_markup]
    assert markers.count("<|open|>") == markers.count("<|close|>")
    assert markers.count("<|sep|>") == 2 * markers.count("<|open|>")
    assert markers.count("<|end_of_msg|>") == len(messages)
    assert markers.count("<|kimi_image_placeholder|>") == len(image_parts(messages))
    ids = TOKENIZER.encode_segments(segments)
    assert TOKENIZER.decode(ids) == "".join(text for text, _ in segments)


@given(st.permutations(range(4)))
def test_any_order_of_matched_results_gives_the_same_encoding(order):
    given_results = [result(f"r{n}", f"c{n}") for n in range(4)]
    calls = assistant("c0", "c1", "c2", "c3")
    assert rendered([calls, *(given_results[n] for n in order)]) == rendered([calls, *given_results])
