"""The report as a page: what it must say, that it is whole, and that it needs nothing else."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from parity.findings import Diagnosis, Guess, Report, Worst
from parity.page import known_page, write_page
from parity.page.culprits import failure_groups, wrong_modules
from parity.page.growth import panels
from parity.page.heat import cell_of, tap_kind, tap_map
from parity.page.numbers import amount, number, share_text
from parity.page.render import page
from parity.tests.reports import COMMAND, failing, finding, invented, passing
from parity.tests.test_cli import assert_one_line, k3_parity
from reference.errors import InputError

VOID = {"meta", "link", "line", "br"}


class Words(HTMLParser):
    """The text of a page with whitespace folded; it must close every element that it opens."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.parts: list[str] = []
        self.ids: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open, self.open
        self.text = " ".join(" ".join(self.parts).split())

    def handle_starttag(self, tag, attributes):
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.parts.append(data)


def words(report: Report) -> str:
    return Words(page(report)).text


@pytest.fixture(scope="module")
def bad() -> str:
    return words(failing())


def test_the_verdict_comes_first_then_culprit_diagnosis_and_command(bad):
    said = [
        "disagrees with the reference",
        "Culprit: kda.gate K3.md §4.4",
        "Looks like F01 + F02",
        "“A_log is per channel, since its length is the head size”",
        wrong_modules(failing())[0].first.command,
        "How to read this page",
    ]
    places = [bad.index(text) for text in said]
    assert places == sorted(places)


def test_only_the_source_is_called_a_culprit():
    """The recurrence fails in the same layers, by the gate's fault."""
    assert any(item.module == "kda.recurrence" for item in failing().failures)
    assert [item.module for item in wrong_modules(failing())] == ["kda.gate"]


def test_a_diagnosed_whole_stands_for_its_parts():
    """From a trace attention is diagnosed as a whole, though the tap that failed is its output."""
    wrong = finding(module="kda.output", section="§4.6", status="fail", error=0.5, isolated=False, inputs_agree=True)
    guesses = failing().diagnoses[0].guesses
    report = invented(wrong, diagnoses=(Diagnosis(module="kda", error=0.5, fits=True, guesses=guesses),))
    (culprit,) = wrong_modules(report)
    assert culprit.module == "kda" and culprit.first is report.findings[0]
    assert "Culprit: kda K3.md §4.6 Looks like F01 + F02" in words(report)


def test_a_run_that_shows_logits_alone_does_not_accuse_the_last_product():
    chain = {"check": "golden", "status": "fail", "error": 0.5, "isolated": False, "inputs_agree": True}
    wrong = finding(module="kda.output", section="§4.6", regime="prefill", **chain)
    later = finding(module="lm_head", section="§6", tap="mm/logits", regime="mm", **chain)
    assert [item.module for item in wrong_modules(invented(later, wrong))] == ["kda"]


def test_every_failure_is_there_under_its_command(bad):
    groups = failure_groups(failing())
    assert sum(len(group.members) for group in groups) == len(failing().failures) > 100
    for group in groups:
        assert group.command in bad
    assert groups[0].sources and not groups[-1].sources
    assert page(failing()).count("right is ") >= sum(item.worst is not None for item in failing().failures)


def test_every_module_and_every_version_is_there(bad):
    for item in failing().findings:
        assert item.module in bad
    for key, text in failing().header.items():
        assert key in bad and " ".join(text.split()) in bad


def test_error_over_layers_both_ways_in_both_dtypes():
    drawn = panels(failing())
    assert [(item.isolated, item.dtype) for item in drawn] == [
        (True, "float32"), (True, "bfloat16"), (False, "float32"), (False, "bfloat16"),
    ]  # fmt: skip
    isolated, chained = drawn[0], drawn[2]
    assert [point.layer for point in isolated.points if point.failed] == [0, 1, 3], "the KDA layers of this case"
    assert all(point.failed for point in chained.points), "one wrong module spoils all that follows"
    for point in isolated.points + chained.points:
        assert point.failed == (point.y < point.y_allowed), "an error over its limit is drawn above it"


def test_the_heat_map_names_the_tap():
    isolated = tap_map(failing(), isolated=True)
    assert isolated.columns == ("mini",)
    cells = {(row.label, row.module): row.cells[0] for row in isolated.rows}
    assert cells["self_attn.log_decay", "kda.gate"].text.endswith("◆")
    assert cells["self_attn.core", "kda.recurrence"].shade.startswith("f")
    assert "◆" not in cells["self_attn.core", "kda.recurrence"].text
    assert cells["mlp.output", "mlp"].shade.startswith("p")


def test_a_passing_run_says_how_near_it_came():
    text = words(passing())
    assert "✓ mlx agrees with the reference" in text and "Nearest to it:" in text
    assert "Culprit" not in text and "Every failure" not in text


def test_it_needs_no_network_and_no_script():
    source = page(failing())
    assert not re.search(r"<script|<iframe|@import|url\(|\bsrc=|https?://", source)
    assert re.findall(r'href="([^"]*)"', source) == ["data:,"]
    assert "default-src 'none'" in source


def test_accessible_names_are_there_once():
    parsed = Words(page(failing()))
    assert len(parsed.ids) == len(set(parsed.ids))
    source = page(failing())
    for names in re.findall(r'aria-labelledby="([^"]*)"', source):
        assert set(names.split()) <= set(parsed.ids)
    assert source.count("<svg") == source.count('role="img"') == source.count("<desc") == 4


def test_words_of_a_port_are_text_not_markup():
    note = "<script>alert('x')</script> & <b>"
    source = page(invented(finding(status="error", error=None, allowed=None, note=note, inputs_agree=True)))
    assert note not in source and note in unescape(source)


def test_unsupported_is_counted_apart():
    lacks = [finding(status="unsupported", error=None, module="projector", note="no pictures") for _ in range(7)]
    text = words(invented(finding(), *lacks))
    assert "1 passed 0 failed 7 unsupported" in text
    assert "layers projector 7 no pictures" in text and "agrees with the reference" in text
    assert "was not compared at all" in words(invented(*lacks))


def test_a_crash_and_an_infinite_error_have_their_words():
    crash = finding(status="error", error=None, allowed=None, note="RuntimeError: out of luck", inputs_agree=True)
    assert "could not load or crashed" in words(invented(crash)) and "out of luck" in words(invented(crash))
    wrong = finding(status="fail", error=float("inf"), note="shape [2] where [3] is right", inputs_agree=True)
    text = words(invented(wrong, finding(tap="language_model.model.layers.1.mlp.output")))
    assert "∞" in text and "shape [2] where [3] is right" in text and COMMAND in text


def test_a_mistake_that_nobody_made_yet_and_a_module_without_known_faults():
    wrong = finding(status="fail", error=0.5, inputs_agree=True, worst=Worst(index=(0, 3), found=2.0, truth=1.0))
    near = Guess(faults=("F70",), claims=("the gate is linear",), residual=0.4)
    text = words(invented(wrong, diagnoses=(Diagnosis(module="mlp", error=0.5, fits=False, guesses=(near,)),)))
    assert "Looks like no known fault; the nearest is F70 , “the gate is linear”." in text
    assert "worst element [0, 3] is 2, right is 1" in text
    bare = invented(wrong, diagnoses=(Diagnosis(module="mlp", error=0.5, fits=False, guesses=()),))
    assert "There are no known faults of this module" in words(bare)


def test_the_reference_itself_is_accused_first():
    text = words(
        invented(finding(check="anchor", module="reference: mlp", status="fail", error=1.0, inputs_agree=True))
    )
    assert text.index("The reference itself departs from") < text.index("Culprit")


def test_numbers_and_names():
    assert [amount(x) for x in (None, 0.0, 0.914, 355.2, 9.54e-7, float("inf"))] == [
        "", "0", "0.91", "355", "9.5e-7", "∞",
    ]  # fmt: skip
    assert [share_text(x) for x in (0.0, 0.004, 0.5, 2.0, 137.0, 9.4e5)] == ["0", "<.01", ".50", "×2.0", "×137", "×9e5"]
    assert [number(x) for x in (-5.0, -1.51335e-9)] == ["-5", "-1.513e-9"]
    assert tap_kind("prefill/language_model.model.layers.12.mlp.output") == "mlp.output"
    assert tap_kind("encoder.blocks.3.attention") == "encoder.blocks.attention"
    assert cell_of([], ()) is None


def test_an_existing_page_is_replaced_and_nothing_else_is_left(tmp_path: Path):
    path = tmp_path / "report.html"
    path.write_text("old")
    write_page(path, passing())
    assert path.read_text().startswith("<!doctype html>") and list(tmp_path.iterdir()) == [path]


def test_a_page_that_cannot_be_finished_is_not_there(tmp_path: Path, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match="No space left"):
        write_page(tmp_path / "report.html", passing())
    assert not list(tmp_path.iterdir())


def test_places_where_no_page_can_be(tmp_path: Path):
    for path, word in ((tmp_path, "directory"), (tmp_path / "none" / "report.html", "folder")):
        with pytest.raises(InputError, match=word):
            known_page(path)


def test_check_refuses_a_bad_place_before_it_starts(tmp_path: Path):
    assert_one_line(k3_parity("check", "--report", tmp_path), str(tmp_path), "--report")
    missing = tmp_path / "none" / "report.html"
    assert_one_line(k3_parity("check", "--report", missing), str(missing), "--report")
    assert not missing.parent.exists()


def test_check_writes_the_page(tmp_path: Path):
    path = tmp_path / "report.html"
    done = k3_parity("check", "--port", "reference", "--check", "modules", "--dtype", "float32", "--report", path)
    assert done.returncode == 0, done.stderr
    assert str(path) in done.stderr and "agrees with the reference" in Words(path.read_text()).text
