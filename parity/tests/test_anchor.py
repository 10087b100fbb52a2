"""The truth is not its own judge: a fault in the reference itself is found by the authors' results."""

from __future__ import annotations

import pytest

import reference.vision
from parity.checks import CHECKS, Plan
from parity.faults import Fault, fault
from parity.findings import Report
from parity.ports import load_port


def blamed(check: str, port: str) -> set[str]:
    findings = tuple(CHECKS[check](Plan(load_port(port), dtypes=("float32",))))
    return {finding.module for finding in Report(port=port, header={}, findings=findings, seconds=0.0).sources} & {
        finding.module for finding in findings if finding.status == "fail"
    }


def wrong_eps(original, package):
    return lambda x, weight, eps: original(x, weight, 2.0**-7)


def forgotten(original, package):
    return lambda x, state, lengths: 0 * original(x, state, lengths)


def counted_from_one(original, package):
    return lambda layer, block_size: original(layer + 1, block_size)


def padding_seen(original, package):
    return lambda key_mask, new_tokens: original(key_mask | True, new_tokens)


@pytest.mark.parametrize(
    "wrong, module",
    [
        (fault("F02"), "kda"),
        (fault("F44"), "attn_res.output"),
        (Fault("F99", "vision", "eps is bfloat16's", "", {"vision.norm_rounded_once": wrong_eps}), "vision.block"),
    ],
    ids=["gate", "output-mix", "vision-eps"],
)
def test_a_wrong_reference_is_named(wrong: Fault, module: str):
    """Everything the harness computes is wrong alike, the float64 truth too; only the golden trace is not."""
    with wrong.applied("reference"):
        assert f"reference: {module}" in blamed("anchor", "mlx")
        assert module in blamed("golden", "reference")
    assert not blamed("anchor", "mlx")
    assert reference.vision.VISION_NORM_EPS < 2e-7


@pytest.mark.parametrize(
    "wrong, module",
    [
        (
            Fault("F90", "short_conv", "the window is not kept", "", {"short_conv.next_conv_state": forgotten}),
            "short_conv",
        ),
        (Fault("F91", "attn_res", "blocks from layer 1", "", {"attn_res.starts_block": counted_from_one}), "attn_res"),
        (Fault("F92", "mla", "padding is a key", "", {"mla.allowed_keys": padding_seen}), "mla.attention"),
    ],
    ids=["conv-window", "blocks", "padding"],
)
def test_what_only_a_whole_pass_shows(wrong: Fault, module: str):
    """Caches, masks and the block bank: no module alone, on a given input, can feel them."""
    with wrong.applied("reference"):
        assert f"reference: {module}" in blamed("anchor", "mlx")
