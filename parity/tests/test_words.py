"""The checks of tokenizer and chat encoding: what they accept, what they refuse, what they say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from parity.checks import Plan, chat, tokenizer
from parity.fault_catalogue.words import FAULTS
from parity.faults import Fault
from parity.findings import Finding
from parity.kill_matrix import kill
from parity.ports import load_port
from parity.protocol import Unsupported
from reference.tokenizer import Tokenizer


def findings(**methods) -> list[Finding]:
    """Of a port that has these methods and no others."""
    check = tokenizer if "tokenize" in methods or not methods else chat
    return list(check.run(Plan(SimpleNamespace(name="own", **methods))))


@pytest.mark.parametrize("port", ["mlx", "reference"])
@pytest.mark.parametrize("item", FAULTS, ids=lambda item: item.id)
def test_every_fault_is_caught_at_its_module(item: Fault, port: str):
    result = kill(item, port, "float32")
    assert result.status == "caught" and result.named[0] == item.module


def test_without_a_tokenizer_the_check_is_unsupported():
    def refuse(folder, segments):
        raise Unsupported("no time for tokens")

    (finding,) = findings()
    assert (finding.status, finding.module) == ("unsupported", "tokenizer")
    assert {finding.status for finding in findings(tokenize=refuse)} == {"unsupported"}


def test_a_lone_surrogate_may_be_refused_or_replaced():
    def ids(replacement: str):
        def tokenize(folder, segments):
            text = [(text.replace("\ud800", replacement), markup) for text, markup in segments]
            return Tokenizer.from_folder(folder).encode_segments(text)

        return {finding.regime: finding.status for finding in findings(tokenize=tokenize)}["surrogate"]

    assert [ids("\ud800"), ids("\ufffd"), ids("?"), ids("")] == ["pass", "pass", "fail", "fail"]


def test_the_first_id_that_differs_is_named():
    def last_is_lost(folder, segments):
        return Tokenizer.from_folder(folder).encode_segments(segments)[:-1]

    def shifted(folder, segments):
        return [id + 1 for id in Tokenizer.from_folder(folder).encode_segments(segments)]

    lost = {finding.regime: finding for finding in findings(tokenize=last_is_lost)}
    assert lost["empty"].status == "pass" and "ids where" in lost["dashes"].note
    wrong = next(finding for finding in findings(tokenize=shifted) if finding.regime == "digits")
    assert wrong.status == "fail" and wrong.note.startswith("id 0 is") and "b'1'" in wrong.note


def test_a_crash_is_an_error_of_the_port():
    def crash(*arguments):
        raise RuntimeError("out of luck")

    for methods in ({"tokenize": crash}, {"chat": crash}):
        statuses = [finding.status for finding in findings(**methods)]
        assert "error" in statuses and "fail" not in statuses


def test_the_first_segment_that_differs_is_named():
    encode = load_port("reference").chat
    found = findings(chat=lambda call: [(text.replace("città", "citta"), markup) for text, markup in encode(call)])
    failed = [finding for finding in found if finding.status == "fail"]
    assert {finding.case for finding in failed} == {
        "own-unicode-tools",
        "own-unicode-arguments",
        "own-effort-max",
        "own-later-tools",
    }
    assert all("is right" in finding.note for finding in failed)
