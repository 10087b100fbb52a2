from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.chat import encode_conversation, image_parts
from reference.chat_markup import escaped
from reference.chat_tools import json_type
from reference.tests.vocabulary import DISTANCES, GOLDEN, raises_one_line, small_tokenizer

DOCUMENT = json.loads((GOLDEN / "chat.json").read_text(encoding="utf-8"))
TOKENIZER = small_tokenizer()
MARKERS = "".join(DISTANCES) + "<|kimi_image_placeholder|>"
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"z": 1, "a": {"y": 1, "b": "é"}}}}


def rendered(messages, **call) -> str:
    """The encoding as one string: markup in ⟦⟧ without its bars, adjacent text joined."""
    segments = encode_conversation(messages, **{"add_generation_prompt": False, **call})
    pieces = (f"⟦{text.removeprefix('<|').removesuffix('|>')}⟧" if is_markup else text for text, is_markup in segments)
    return "".join(pieces)


def message(attributes: str, body: str) -> str:
    return f"⟦open⟧message {attributes}⟦sep⟧{body}⟦close⟧message⟦sep⟧⟦end_of_msg⟧"


def tag(name: str, body: str, attributes: str = "") -> str:
    return f"⟦open⟧{name}{attributes}⟦sep⟧{body}⟦close⟧{name}⟦sep⟧"


def assistant(*calls, **fields):
    """An assistant message that calls tool f0 with id calls[0], and so on."""
    functions = [{"name": f"f{n}", "arguments": {}} for n in range(len(calls))]
    entries = [{"id": id, "type": "function", "function": f} for id, f in zip(calls, functions, strict=True)]
    return {"role": "assistant", "content": "", "tool_calls": entries, **fields}


def result(content, id=None, **fields):
    return {"role": "tool", "content": content, **({} if id is None else {"tool_call_id": id}), **fields}


def results(*messages) -> list[tuple[str, str, str]]:
    """(tool, index, content) of every tool message, in the order of the encoding."""
    found = []
    for part in rendered(list(messages)).split("⟦open⟧message ")[1:]:
        if part.startswith('role="tool"'):
            head, body = part.split("⟦sep⟧", 1)
            _, _, _, tool, _, index, _ = head.split('"')
            found.append((tool, index, body.split("⟦close⟧")[0]))
    return found


def call_body(arguments) -> str:
    """What stands inside the one call with these arguments."""
    calls = [{"id": "c", "function": {"name": "f", "arguments": arguments}}]
    text = rendered([{"role": "assistant", "content": "", "tool_calls": calls}])
    return text.split('⟦open⟧call tool="f" index="1"⟦sep⟧')[1].split("⟦close⟧call")[0]


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


@pytest.mark.parametrize(("value", "expected"), [('a"b', "a&quot;b"), ("&quot;", "&amp;quot;"), ("<'>\n|>", "<'>\n|>")])
def test_attribute_values_escape_two_characters_only(value, expected):
    assert escaped(value) == expected


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


def test_declared_tools_keep_their_order_and_sort_their_keys():
    text = rendered([], tools=[{"name": "b"}, {"z": {"b": [1, {"d": 1, "c": None}], "a": "{}"}, "name": "a"}])
    assert '[{"name":"b"},{"name":"a","z":{"a":"{}","b":[1,{"c":null,"d":1}]}}]' in text
    assert rendered([USER], tools=[]) == rendered([USER], tools=None)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (None, ""),
        ("", ""),
        (" \n", ""),
        ({}, ""),
        ("{}", ""),
        ('{"a": 1.50}', tag("argument", "1.5", ' key="a" type="number"')),
        ('{"a": 1e400}', tag("argument", "Infinity", ' key="a" type="number"')),
        ({"a": False}, tag("argument", "false", ' key="a" type="boolean"')),
        ({"a": None}, tag("argument", "null", ' key="a" type="null"')),
        ({"a": ""}, tag("argument", "", ' key="a" type="string"')),
        ({"": 'q"\\<&'}, tag("argument", 'q"\\<&', ' key="" type="string"')),
        ({'k"&': 2**70}, tag("argument", str(2**70), ' key="k&quot;&amp;" type="number"')),
        ({"a": []}, tag("argument", "[]", ' key="a" type="array"')),
        ({"a": ["日", {"z": 1, "é": "\n"}]}, tag("argument", '["日", {"z": 1, "é": "\\n"}]', ' key="a" type="array"')),
        ({"a": {"z": 1, "b": None}}, tag("argument", '{"z": 1, "b": null}', ' key="a" type="object"')),
        ('{"a":1,"a":2}', tag("argument", "2", ' key="a" type="number"')),
        ('{"a": "x"', tag("json", '{"a": "x"', ' type="object"')),
        ("<|open|>", tag("json", "<|open|>", ' type="object"')),
    ],
)
def test_call_arguments(arguments, expected):
    assert call_body(arguments) == expected


def test_calls_without_an_inner_function_object_read_the_same():
    nested = assistant("a")
    flat = {**nested, "tool_calls": [{"id": "a", **nested["tool_calls"][0]["function"]}]}
    assert rendered([flat]) == rendered([nested])


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([assistant("a", "b"), result("B", "b"), result("A", "a")], [("f0", "1", "A"), ("f1", "2", "B")]),
        ([assistant("a", "b", "c"), result("C", "c"), result("A", "a")], [("f0", "1", "A"), ("f2", "2", "C")]),
        ([assistant("a", "b"), result("B", "b")], [("f1", "1", "B")]),
        ([assistant("a", "b"), result("x"), result("y")], [("f0", "1", "x"), ("f1", "2", "y")]),
        ([assistant("a", "b"), result("x", "b"), result("y", "?")], [("f0", "1", "x"), ("f1", "2", "y")]),
        ([assistant("a", "b"), result("x", name="f1"), result("y", tool="t")], [("f1", "1", "x"), ("t", "2", "y")]),
        ([assistant("a"), result("x", "a", name="other")], [("f0", "1", "x")]),
        ([assistant("a"), result("x", "a"), result("y", "?", name="n")], [("f0", "1", "x"), ("n", "2", "y")]),
        ([assistant("a", "b"), result("B", "b"), USER, result("A", "a")], [("f1", "1", "B"), ("f0", "2", "A")]),
        ([assistant("a"), result("x", "a"), assistant("a"), result("y", "a")], [("f0", "1", "x"), ("f0", "1", "y")]),
        ([assistant(1, 2), result("B", "2"), result("A", 1)], [("f0", "1", "A"), ("f1", "2", "B")]),
        ([assistant(None, None), result("x"), result("y")], [("f0", "1", "x"), ("f1", "2", "y")]),
        ([assistant("", ""), result("x", ""), result("y", "")], [("f0", "1", "x"), ("f1", "2", "y")]),
        ([assistant("a"), result("x", "a"), result("again", "a")], [("f0", "1", "x"), ("f0", "2", "again")]),
        ([USER, result("x", name='n"')], [("n&quot;", "1", "x")]),
    ],
    ids=[
        "swapped",
        "two of three, swapped",
        "index counts results, not calls",
        "no ids",
        "one unknown id spoils the match",
        "unmatched results name themselves",
        "a matched id outweighs the name",
        "more results than calls",
        "two runs are ordered each by itself",
        "index restarts",
        "ids are compared as text",
        "null ids match nothing",
        "empty ids match nothing",
        "two results for one call",
        "no call at all",
    ],
)
def test_tool_results_take_tool_index_and_order_from_the_calls(messages, expected):
    assert results(*messages) == expected


@pytest.mark.parametrize(
    "messages",
    [
        [result("x")],
        [assistant("a"), result("x", "a"), result("y")],
        [assistant("a"), {"role": "assistant", "content": "x"}, result("y", "a")],
        [USER, result("x", name=5)],
    ],
)
def test_a_result_without_a_tool_is_refused(messages):
    with raises_one_line(f"messages[{len(messages) - 1}]: tool result"):
        encode_conversation(messages)


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


CIRCULAR: list = []
CIRCULAR.append(CIRCULAR)


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


@pytest.mark.parametrize("arguments", ["[1]", "5", "null", [1], {1: 2}, {"a": {2}}, {"a": CIRCULAR}, "[" * 100_000, '{"a": ' + "1" * 5000 + "}"])
def test_bad_arguments_are_refused_in_one_line(arguments):
    with raises_one_line("messages[0].tool_calls[0]"):
        call_body(arguments)


def test_types_of_values():
    values = ["x", True, 1, 1.5, None, [], (), {}]
    expected = ["string", "boolean", "number", "number", "null", "array", "array", "object"]
    assert [json_type(value) for value in values] == expected


# text and markup


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
    call = DOCUMENT["cases"]["attr-escape"]["call"]
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
