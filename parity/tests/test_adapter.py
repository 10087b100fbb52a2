"""Someone else's modules under test: an adapter of sixty lines, and what a Watch must leave as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from parity.checks import CHECKS, Plan
from parity.checks.plan import case_named
from parity.findings import Report
from parity.ports import load_port
from parity.ports.adapter import padding_of, whole_mask
from parity.ports.watch import Watch
from parity.protocol import Step, Unsupported

ADAPTER = Path(__file__).parent / "engines" / "adapter.py"


def run(port, check: str, case: str = "vision-window") -> Report:
    findings = tuple(CHECKS[check](Plan(port, (case_named(case),), ("float32",))))
    return Report(port=port.name, header={}, findings=findings, seconds=0.0)


@pytest.fixture(scope="module")
def outside():
    return load_port("parity.tests.engines.adapter:PORT")


def test_an_adapter_is_short():
    assert len(ADAPTER.read_text().splitlines()) <= 60


@pytest.mark.parametrize("check", ["layers", "end_to_end", "decode"])
def test_the_port_seen_from_outside_agrees(outside, check: str):
    report = run(outside, check)
    assert not report.failures and report.counts["pass"] >= 12
    assert {finding.note for finding in report.findings if finding.status == "unsupported"} == {
        "this port does not show this tap, and declares so"
    }


@pytest.mark.parametrize(
    ("layer", "target", "module"),
    [
        (0, "self_attn", "kda.output"),
        (1, "self_attn", "mla.output"),
        (0, "post_attention_layernorm", "attn_res"),
        (0, "mlp", "mlp"),
        (1, "block_sparse_moe", "latent_moe"),
    ],
)
def test_a_wrong_module_is_named(outside, monkeypatch: pytest.MonkeyPatch, layer: int, target: str, module: str):
    """Its weights are one per cent too large; nothing else is named."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    load_own = outside.load

    def load(folder, config, dtype):
        model = load_own(folder, config, dtype)
        wrong = getattr(outside.layers(model)[layer], target)
        weights = tree_flatten(wrong.parameters())
        larger = [(name, 1.01 * value) for name, value in weights if mx.issubdtype(value.dtype, mx.floating)]
        wrong.load_weights(larger, strict=False)
        return model

    monkeypatch.setattr(outside, "load", load)
    assert {finding.module for finding in run(outside, "layers").sources} == {module}


def test_a_declared_tap_that_is_missing_fails(outside, monkeypatch: pytest.MonkeyPatch):
    own = outside.watch
    monkeypatch.setattr(outside, "watch", lambda model, text, watch: own(model, text, Mute(watch)))
    report = run(outside, "layers")
    failed = {(finding.tap.rpartition(".")[2], finding.note) for finding in report.failures}
    assert failed == {("logits", "the port does not show this tap")}


class Mute:
    """A Watch that never hears of the logits."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def result(self, module, tap, *more):
        if tap != "logits":
            self.watch.result(module, tap, *more)


class Module:
    def __call__(self, x):
        return 2 * x


class Child(Module):
    pass


def test_a_watch_changes_classes_only_while_it_is_active():
    module, other, watch = Child(), Child(), Watch()
    watch.result(module, "seen")
    watch.given(module, "given")
    with pytest.raises(ZeroDivisionError), watch.active():
        assert module(3) == 6 and other(4) == 8
        raise ZeroDivisionError
    assert watch.taps == {"seen": 6, "given": 3}
    assert "__call__" not in Child.__dict__ and module(5) == 10 and watch.taps["seen"] == 6


def test_a_module_is_answered_for_or_left_out():
    first, second, watch = Module(), Module(), Watch()
    watch.answer(first, 7)
    watch.skip(second)
    watch.result(first, "answer")
    with watch.active():
        assert first(1) == 7 and second(1) == 1 and Module()(1) == 2
    assert watch.taps == {"answer": 7}


def test_masks_are_told_as_padding():
    steps = [Step(input_ids=np.zeros((2, 2), int), mask=np.array([[0, 1], [1, 1]], bool)), Step(np.zeros((2, 1), int))]
    assert padding_of(whole_mask(steps)) == ([1, 0], [0, 0])
    assert whole_mask(steps[1:]) is None
    with pytest.raises(Unsupported, match="between"):
        padding_of(np.array([[1, 0, 1]], bool))
