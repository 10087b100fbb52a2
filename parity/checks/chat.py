"""The chat encoding (K3.md §14): conversations with the segments of the authors' own code, calls to be refused, and
more conversations, with every script and sign in every field, whose truth is the reference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from parity.checks.plan import GOLDEN_IN_REPO, Plan
from parity.compare import Place, crash_note
from parity.findings import Finding
from parity.protocol import Unsupported
from parity.quantities import Quantity
from reference.chat import encode_conversation

CHAT = Quantity("chat", "§14")
OWN = Path(__file__).parents[1] / "cases" / "conversations.json"
"""name → call, as ``k3-parity chat`` reads it."""


def run(plan: Plan) -> Iterator[Finding]:
    encode = getattr(plan.port, "chat", None)
    document = json.loads((GOLDEN_IN_REPO.parent / "chat.json").read_text(encoding="utf-8"))
    if encode is None:
        note = "this port has no chat encoding"
        yield Place("chat", "conversations", "any", seed=plan.seed).finding(CHAT, "chat", "unsupported", note=note)
        return
    for name, case in document["cases"].items():
        yield _conversation(Place("chat", name, "any", seed=plan.seed), encode, case["call"], case["segments"])
    for name, call in json.loads(OWN.read_text(encoding="utf-8")).items():
        segments = [list(segment) for segment in encode_conversation(**call)]
        yield _conversation(Place("chat", name, "any", seed=plan.seed), encode, call, segments)
    for name, case in document["errors"].items():
        yield _refusal(Place("chat", name, "any", seed=plan.seed), encode, case["call"])


def _conversation(place: Place, encode, call: dict, segments: list[list]) -> Finding:
    try:
        found = [list(segment) for segment in encode(call)]
    except Unsupported as reason:
        return place.finding(CHAT, "segments", "unsupported", note=str(reason))
    except Exception as error:
        return place.finding(CHAT, "segments", "error", note=crash_note(error), inputs_agree=True)
    if found == segments:
        return place.finding(CHAT, "segments", "pass", error=0.0, allowed=0.0, inputs_agree=True)
    first = next((i for i, pair in enumerate(zip(found, segments, strict=False)) if pair[0] != pair[1]), None)
    if first is None:
        note = f"{len(found)} segments where {len(segments)} are right"
    else:
        note = f"segment {first} is {found[first]!r} where {segments[first]!r} is right"
    return place.finding(CHAT, "segments", "fail", error=float("inf"), allowed=0.0, inputs_agree=True, note=note)


def _refusal(place: Place, encode, call: dict) -> Finding:
    try:
        encode(call)
    except Unsupported as reason:
        return place.finding(CHAT, "refusal", "unsupported", note=str(reason))
    except Exception as error:
        note = crash_note(error)
        return place.finding(CHAT, "refusal", "pass", error=0.0, allowed=0.0, inputs_agree=True, note=note)
    note = "accepts a call that must be refused"
    return place.finding(CHAT, "refusal", "fail", error=float("inf"), allowed=0.0, inputs_agree=True, note=note)
