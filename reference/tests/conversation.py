"""Conversations and a compact way to look at their encoding, for the tests of this package."""

from __future__ import annotations

from reference.chat import encode_conversation

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"z": 1, "a": {"y": 1, "b": "é"}}}}
CIRCULAR: list = []
CIRCULAR.append(CIRCULAR)


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
