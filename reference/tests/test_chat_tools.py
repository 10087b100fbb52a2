from __future__ import annotations

import pytest

from reference.chat import encode_conversation
from reference.chat_tools import json_type
from reference.tests.conversation import CIRCULAR, USER, assistant, call_body, rendered, result, results, tag
from reference.tests.vocabulary import raises_one_line


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


@pytest.mark.parametrize(
    "arguments",
    ["[1]", "5", "null", [1], {1: 2}, {"a": {2}}, {"a": CIRCULAR}, "[" * 100_000, '{"a": ' + "1" * 5000 + "}"],
)
def test_bad_arguments_are_refused_in_one_line(arguments):
    with raises_one_line("messages[0].tool_calls[0]"):
        call_body(arguments)


def test_types_of_values():
    values = ["x", True, 1, 1.5, None, [], (), {}]
    expected = ["string", "boolean", "number", "number", "null", "array", "array", "object"]
    assert [json_type(value) for value in values] == expected
