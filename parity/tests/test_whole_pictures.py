"""A whole picture within text: every feature arrives, and an implementation that keeps one of them is told so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fixtures.catalogue import SMALL_TEXT, Entry, config
from parity.checks import Plan
from parity.checks.multimodal import merged_findings
from parity.checks.plan import Case
from parity.faults import FaultyPort, fault
from parity.findings import Report
from parity.ports import load_port
from parity.tests.test_cli import ROOT, k3_parity
from parity.true_width.vision import picture
from reference.image_processor import ImageProcessor

SIDE, PATCHES = 448, 14
"""The released patch size: 448×448 pixels are 32×32 patches, 256 features."""


@pytest.fixture(scope="module")
def case() -> Case:
    settings = config(SMALL_TEXT, kinds="km", vision={"patch_size": PATCHES})
    return Case(Entry("whole-picture", settings, reason="patches of the released size"), 0)


def inputs(case: Case) -> tuple[np.ndarray, ...]:
    """Fourteen tokens, the sixth of them a placeholder, their mask, and one picture: pixel values and grid."""
    ids = np.arange(1, 15)[None]
    ids[0, 5] = case.config.media_placeholder_token_id
    processor = ImageProcessor.from_folder(case.checkpoint)
    return ids, np.ones_like(ids), processor.pixel_values(picture(SIDE, SIDE)), np.array([processor.grid(SIDE, SIDE)])


def findings(case: Case, port) -> Report:
    plan, (ids, mask, *pictures) = Plan(port, (case,), ("float32",)), inputs(case)
    found = merged_findings(plan, case, "float32", "left", ids, mask, tuple(pictures))
    return Report(port=port.name, header={}, findings=tuple(found), seconds=0.0)


def test_fourteen_tokens_become_269_and_the_logits_match(case: Case):
    report = findings(case, load_port("mlx"))
    assert not report.failures
    taps = {finding.tap: finding for finding in report.findings}
    assert set(taps) == {"merged_embeds", "attention_mask", "position_ids", "logits"}
    assert 0 < taps["logits"].error < 2e-5
    sides = Plan(load_port("mlx"), (case,)).sides(case, "float32")
    for side in (sides.truth, sides.port):
        found = side.multimodal(*inputs(case))
        assert found["merged_embeds"].shape[:2] == found["logits"].shape[:2] == (1, 269)


@pytest.mark.parametrize(("port", "package"), [("mlx", "port"), ("reference", "reference")])
def test_a_scatter_of_the_same_length_is_the_merge_s_fault(case: Case, port: str, package: str):
    report = findings(case, FaultyPort(load_port(port), package, [fault("F94")]))
    assert report.exit_code == 1
    assert {finding.module for finding in report.sources} == {"merge"}
    assert any("[1, 14" in finding.note and "[1, 269" in finding.note for finding in report.sources)


def test_check_names_the_merge(tmp_path: Path):
    (tmp_path / "scattering_port.py").write_text(
        "from parity.faults import FaultyPort, fault\n"
        "from parity.ports import load_port\n"
        "PORT = FaultyPort(load_port('mlx'), 'port', [fault('F94')])\n"
    )
    arguments = ("--check", "multimodal", "--case", "mini", "--dtype", "float32")
    done = k3_parity("check", "--port", "scattering_port:PORT", *arguments, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 1, done.stderr
    assert "merge" in done.stdout and "merged_embeds" in done.stdout and "is right" in done.stdout
