from __future__ import annotations

import json

import pytest

from reference.chat import encode_conversation, image_parts
from reference.tests.conversation import CIRCULAR, TOOL, USER, assistant, message, rendered, result, results, tag
from reference.tests.vocabulary import GOLDEN, raises_one_line

DOCUMENT = json.loads((GOLDEN / "chat.json").read_text(encoding="utf-8"))


# the authors' own answers


def test_the_golden_file_is_whole():
    assert len(DOCUMENT["cases"]) == 21 and len(DOCUMENT["errors"]) == 3


@pytest.mark.parametrize("name", DOCUMENT["cases"])
def test_golden_conversation(name):
    case = DOCUMENT["cases"][name]
    assert [list(segment) for segment in encode_conversation(**case["call"])] == case["segments"]


@pytest.mark.parametrize("name", DOCUMENT["errors"])
def test_golden_refusal(name):
    with raises_one_line("expected"):
        encode_conversation(**DOCUMENT["errors"][name]["call"])


# messages


def test_thinking_mode_always_has_a_think_element_and_the_other_never():
    messages = [{"role": "assistant", "content": "x", "reasoning_content": "why"}]
    assert rendered(messages) == message('role="assistant"', tag("think", "why") + tag("response", "x"))
    assert rendered(messages, thinking=False) == message('role="assistant"', tag("response", "x"))
    assert rendered([{"role": "assistant"}]) == message('role="assistant"', tag("think", "") + tag("response", ""))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_content": "A", "reasoning": "B"}, "A"),
        ({"reasoning_content": "", "reasoning": "B"}, "B"),
        ({"reasoning_content": None, "reasoning": "B"}, "B"),
        ({"reasoning_content": "\n A "}, "\n A "),
        ({"reasoning_content": " \n"}, ""),
        ({"reasoning": None}, ""),
    ],
)
def test_reasoning_comes_from_either_field_and_blank_is_none(fields, expected):
    text = rendered([{"role": "assistant", "content": "x", **fields}])
    assert text == message('role="assistant"', tag("think", expected) + tag("response", "x"))


def test_the_generation_prompt_opens_think_or_response():
    opened = '⟦open⟧message role="assistant"⟦sep⟧⟦open⟧{}⟦sep⟧'
    assert rendered([], add_generation_prompt=True) == opened.format("think")
    assert rendered([], add_generation_prompt=True, thinking=False) == opened.format("response")


def test_names_of_any_role_but_tool_are_attributes_and_empty_ones_are_not():
    assert rendered([{"role": "system", "content": "x", "name": "n"}]) == message('role="system" name="n"', "x")
    for name in ("", None):
        assert rendered([{**USER, "name": name}]) == message('role="user"', "hi")
    body = tag("think", "") + tag("response", "x")
    assert rendered([{"role": "assistant", "content": "x", "name": "n"}]) == message('role="assistant" name="n"', body)


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_empty_content_gives_no_segment(content):
    assert rendered([{"role": "user", "content": content}]) == message('role="user"', "")
    assert all(text for text, _ in encode_conversation([{"role": "user", "content": content}]))


def test_text_parts_stay_segments_of_their_own():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    segments = encode_conversation([{"role": "user", "content": parts}])
    assert ("a", False) in segments and ("b", False) in segments


# images


def test_image_prompts_are_markup_in_the_order_of_the_parts_in_any_role():
    image = [{"type": "image", "image": "x"}]
    messages = [
        {"role": "system", "content": image},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}, *image]},
        assistant("a", content=image),
        result(image, "a"),
    ]
    segments = encode_conversation(messages, image_prompts=list("VWXYZ"))
    assert [text for text, is_markup in segments if is_markup and len(text) == 1] == list("VWXYZ")


def test_image_parts_come_in_the_order_of_the_encoding():
    one, two = ({"type": "image", "image": name} for name in ("one", "two"))
    messages = [assistant("a", "b"), result([two], "b"), result([one], "a")]
    assert image_parts(messages) == [one, two]
    assert results(*messages) == [("f0", "1", "⟦kimi_image_placeholder⟧"), ("f1", "2", "⟦kimi_image_placeholder⟧")]


def test_a_typed_placeholder_is_text_and_takes_no_image_prompt():
    text = "<|kimi_image_placeholder|> see"
    assert (text, False) in encode_conversation([{"role": "user", "content": text}])
    with raises_one_line("image_prompts", "0 image parts", "found 1"):
        encode_conversation([{"role": "user", "content": text}], image_prompts=["<P>"])


def test_the_placeholder_may_be_another():
    messages = [{"role": "user", "content": [{"type": "image", "image": "x"}]}]
    assert ("<|media_pad|>", True) in encode_conversation(messages, image_placeholder="<|media_pad|>")


@pytest.mark.parametrize("prompts", [[], ["a", "b", "c"]])
def test_a_wrong_number_of_image_prompts_is_refused(prompts):
    image = {"type": "image", "image": "x"}
    with raises_one_line("2 image parts", f"found {len(prompts)}"):
        encode_conversation([{"role": "user", "content": [image, image]}], image_prompts=prompts)


# tools


def test_tools_and_effort_come_first_choice_and_format_last():
    call = dict(tools=[TOOL], thinking_effort="high", tool_choice="none", response_format={"type": "json_object"})
    text = rendered([{"role": "system", "content": "S"}, USER], **call)
    kinds = [part.split("⟦sep⟧")[0] for part in text.split("⟦open⟧message ")[1:]]
    system = 'role="system"'
    first, last = ("tool-declare", "thinking-effort"), ("tool-choice", "response-format")
    expected = [f'{system} type="{kind}"' for kind in first] + [system, 'role="user"']
    assert kinds == expected + [f'{system} type="{kind}"' for kind in last]


def test_tools_of_a_system_message_use_the_further_form_in_its_place():
    declaration = (
        "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
        "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
        '```json\n[{"function":{"name":"lookup","parameters":{"a":{"b":"é","y":1},"z":1}},"type":"function"}]\n```'
    )
    for fields in ({}, {"content": None}, {"content": "", "name": "n"}):
        text = rendered([USER, {"role": "system", "tools": [TOOL], **fields}])
        expected = message('role="system" type="tool-declare"', declaration)
        assert text == message('role="user"', "hi") + expected
    assert rendered([{"role": "system", "content": "S", "tools": []}]) == message('role="system"', "S")


# settings of the call


def test_effort_is_said_in_thinking_mode_only():
    assert "`thinking_effort=max`" in rendered([USER], thinking_effort="max")
    assert rendered([USER], thinking_effort="max", thinking=False) == rendered([USER], thinking=False)


@pytest.mark.parametrize("choice", [None, "auto", {"type": "function", "function": {"name": "lookup"}}])
def test_choices_without_a_message(choice):
    assert rendered([USER], tools=[TOOL], tool_choice=choice) == rendered([USER], tools=[TOOL])


def test_response_formats():
    plain = rendered([USER])
    assert rendered([USER], response_format="text") == rendered([USER], response_format={"type": "text"}) == plain
    as_object = rendered([USER], response_format={"type": "json_object"})
    assert rendered([USER], response_format="json_object") == as_object
    schema = {"title": 'é<"{}', "b": {"d": 1, "c": []}}
    for wrapped in ({"schema": schema, "name": "s", "strict": True}, schema):
        text = rendered([USER], response_format={"type": "json_schema", "json_schema": wrapped})
        assert '\n```json\n{"b":{"c":[],"d":1},"title":"é<\\"{}"}\n```⟦close⟧' in text


@pytest.mark.parametrize(
    ("call", "fragment"),
    [
        ({"messages": None}, "messages: type"),
        ({"messages": {"role": "user"}}, "messages: type"),
        ({"messages": ["hi"]}, "messages[0]: type"),
        ({"messages": [{"content": "x"}]}, "messages[0]: role"),
        ({"messages": [USER, {"role": "developer", "content": "x"}]}, "messages[1]: role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0]: role"),
        ({"messages": [{"role": "user"}]}, "messages[0]: content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0]: content"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages[0]: content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]: type"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0]: type"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "video": "v"}]}]}, "content[0]: type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "content[0]: text"),
        ({"messages": [{**USER, "name": 5}]}, "messages[0]: name"),
        ({"messages": [{"role": "assistant", "reasoning": ["a"]}]}, "messages[0]: reasoning"),
        ({"messages": [{"role": "assistant", "tool_calls": {"id": 1}}]}, "messages[0]: tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "tool_calls[0]: function.name"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}]}, "function.name"),
        ({"messages": [USER], "tools": {"type": "function"}}, "tools: tools"),
        ({"messages": [USER], "tools": ["lookup"]}, "tools: tools"),
        ({"messages": [USER], "tools": [{"f": {1}}]}, "tools: value"),
        ({"messages": [USER], "tools": [{"f": CIRCULAR}]}, "tools: value"),
        ({"messages": [{"role": "system", "tools": "x"}]}, "messages[0]: tools"),
        ({"messages": [USER], "thinking": None}, "thinking"),
        ({"messages": [USER], "add_generation_prompt": "yes"}, "add_generation_prompt"),
        ({"messages": [USER], "thinking_effort": ""}, "thinking_effort"),
        ({"messages": [USER], "thinking_effort": "medium", "thinking": False}, "thinking_effort"),
        ({"messages": [USER], "tool_choice": "any"}, "tool_choice"),
        ({"messages": [USER], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"messages": [USER], "tool_choice": ["auto"]}, "tool_choice"),
        ({"messages": [USER], "response_format": "xml"}, "response_format"),
        ({"messages": [USER], "response_format": {}}, "response_format"),
        ({"messages": [USER], "response_format": "json_schema"}, "response_format"),
        ({"messages": [USER], "response_format": {"type": "json_schema", "schema": {}}}, "response_format"),
        ({"messages": [USER], "response_format": {"type": ["text"]}}, "response_format"),
        ({"messages": [USER], "image_prompts": "<P>"}, "image_prompts: list"),
        ({"messages": [USER], "image_prompts": [""]}, "image_prompts: list"),
        ({"messages": [USER], "image_prompts": 5}, "image_prompts: list"),
    ],
)
def test_bad_calls_are_refused_in_one_line(call, fragment):
    with raises_one_line(fragment):
        encode_conversation(**call)
