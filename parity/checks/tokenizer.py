"""The tokenizer: the ids of text that is awkward to split, and of markup beside text that looks like it (K3.md §13).

The truth is the reference's tokenizer on the same files. Ids are compared exactly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from parity.cases.corpus import SEGMENTS, SURROGATE, TEXTS, corpus_folder
from parity.checks.plan import Plan
from parity.compare import Place, crash_note
from parity.findings import Finding
from parity.protocol import Segments, Unsupported
from parity.quantities import Quantity
from reference.tokenizer import Tokenizer

TOKENIZER = Quantity("tokenizer", "§13")


def run(plan: Plan) -> Iterator[Finding]:
    encode = getattr(plan.port, "tokenize", None)
    place = Place("tokenizer", "corpus", "any", seed=plan.seed)
    if encode is None:
        yield place.finding(TOKENIZER, "ids", "unsupported", note="this port has no tokenizer")
        return
    os.environ["RUST_BACKTRACE"] = "0"  # a panic is a finding here, and its backtrace takes seconds to print
    folder = corpus_folder()
    truth = Tokenizer.from_folder(folder)
    for regime, text in TEXTS.items():
        yield _ids(place._replace(regime=regime), encode, folder, truth, [(text, False)])
    for regime, segments in SEGMENTS.items():
        yield _ids(place._replace(regime=regime), encode, folder, truth, segments)
    yield _surrogate(place._replace(regime="surrogate"), encode, folder, truth)


def _ids(place: Place, encode, folder: Path, truth: Tokenizer, segments: Segments) -> Finding:
    found = _attempt(place, encode, folder, segments)
    return found if isinstance(found, Finding) else _compared(place, found, [truth.encode_segments(segments)], truth)


def _surrogate(place: Place, encode, folder: Path, truth: Tokenizer) -> Finding:
    """No UTF-8 can hold it: to refuse it is right, and so is U+FFFD in its place, as one sign or as its three bytes."""
    found = _attempt(place, encode, folder, [(SURROGATE, False)])
    if not isinstance(found, Finding):
        return _compared(place, found, [truth.encode("a" + count * "\ufffd" + "b") for count in (1, 3)], truth)
    if found.status != "error":
        return found
    return place.finding(TOKENIZER, "ids", "pass", error=0.0, allowed=0.0, inputs_agree=True, note=found.note)


def _attempt(place: Place, encode, folder: Path, segments: Segments) -> list[int] | Finding:
    try:
        return [int(id) for id in encode(folder, segments)]
    except Unsupported as reason:
        return place.finding(TOKENIZER, "ids", "unsupported", note=str(reason))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a tokenizer written in Rust is no Exception
        return place.finding(TOKENIZER, "ids", "error", note=crash_note(error), inputs_agree=True)


def _compared(place: Place, found: list[int], right: list[list[int]], truth: Tokenizer) -> Finding:
    if found in right:
        return place.finding(TOKENIZER, "ids", "pass", error=0.0, allowed=0.0, inputs_agree=True)
    note = _difference(found, right[0], truth)
    return place.finding(TOKENIZER, "ids", "fail", error=float("inf"), allowed=0.0, inputs_agree=True, note=note)


def _difference(found: list[int], right: list[int], truth: Tokenizer) -> str:
    """The first id that differs, or the two lengths."""
    for place, (own, true) in enumerate(zip(found, right, strict=False)):
        if own != true:
            known = truth.token_bytes(own) if 0 <= own < truth.vocab_size else "no token"
            return f"id {place} is {own} ({known!r}) where {true} ({truth.token_bytes(true)!r}) is right"
    return f"{len(found)} ids where {len(right)} are right"
