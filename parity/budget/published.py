"""Figures that are told of K3, beside what the arithmetic gives, and why they differ where they do (K3.md §15)."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

from parity.budget.components import EMBEDDING, PROJECTOR, ROUTED, VISION, parameters
from parity.budget.machines import machines
from parity.budget.reads import caches, read_per_token
from parity.budget.sizes import GB, TB, Recipe, bits_per_weight, expert_bytes, weights
from parity.budget.steps import steps
from reference.config import K3Config

MAC = 512 * GB
RELEASED_CONTEXT = 1 << 20


class Claim(NamedTuple):
    """``agrees``: the computed figure, rounded as the published one is, is the published one."""

    figure: str
    published: str
    computed: str
    agrees: bool
    reason: str = ""


def claims(config: K3Config, workspace_gb: float) -> list[Claim]:
    """All of them, for the released configuration."""
    return [
        *parameter_claims(config),
        *size_claims(config),
        *bit_claims(config),
        *read_claims(config),
        *node_claims(config, workspace_gb),
    ]


def rounded(figure: str, published: str, value: float, digits: int, unit: str, reason: str = "") -> Claim:
    """A claim that agrees if ``value`` with so many ``digits`` is within what is published, a number or "a-b"."""
    low, _, high = published.partition("-")
    agrees = float(low) <= round(value, digits) <= float(high or low)
    computed = f"{value:,.{digits + 2}f}{unit}"
    return Claim(figure, published + unit, computed, agrees, "" if agrees else reason)


def parameter_claims(config: K3Config) -> Iterator[Claim]:
    counts = parameters(config)
    total = sum(counts.values())
    reason = "the tensors add up to 2,779,931,837,184: 2780 to the nearest billion, 2779.9 to one decimal"
    yield rounded("parameters", "2780.0", total / GB, 1, " B", reason)
    yield rounded("in routed experts", "97.94", 100 * counts[ROUTED] / total, 2, " %")


def size_claims(config: K3Config) -> Iterator[Claim]:
    yield rounded("released checkpoint", "1.561", weights(config, Recipe("mxfp4")).nbytes / TB, 3, " TB")
    told = {"mxfp4": "1.56", "3bit": "1.22", "mixed2": "0.97", "2bit": "0.87-0.88"}
    for tier, published in told.items():
        yield rounded(f"tier {tier}", published, weights(config, Recipe(tier)).nbytes / TB, 2, " TB")
    for kept, published in ((242, "451"), (179, "350")):
        nbytes = weights(config, Recipe("mxfp4", 8), kept).nbytes
        reason = "affine 8-bit groups of 64 carry scale and bias (8.5 bits), and norms, convolutions, vision stay bf16"
        yield rounded(f"{kept} of 896 experts, the rest in 8 bits", published, nbytes / GB, 0, " GB", reason)


def bit_claims(config: K3Config) -> Iterator[Claim]:
    """The published bound takes 1.56 TB for 4.25 bits a weight; the release has 4.49 on average: its rest is bf16."""
    released, counts = weights(config, Recipe("mxfp4")), parameters(config)
    yield rounded("bits per weight for 512 GB: 512 GB / 1.56 TB x 4.25", "1.4", MAC / released.nbytes * 4.25, 1, "")
    flat = bits_per_weight(MAC, sum(counts.values()))
    average = bits_per_weight(released.nbytes, sum(counts.values()))
    reason = f"1.56 TB are {average:.2f} bits a weight, not 4.25: bf16 weights are among them"
    yield rounded("  the same if all weights are alike", "1.4", flat, 1, "", reason)
    rest = weights(config, Recipe("mxfp4", 8)).rest
    reason = "the rest keeps its 8 bits and takes its 61 GB first; so the experts must do with less"
    yield rounded(
        "  for the experts, the rest in 8 bits", "1.4", bits_per_weight(MAC - rest, counts[ROUTED]), 1, "", reason
    )


def read_claims(config: K3Config) -> Iterator[Claim]:
    """The published sums count embedding, tower and projector as read; a text token reads one row and neither."""
    top_k, text = config.text_config.num_experts_per_token, config.text_config
    layers = sum(text.is_moe(layer) for layer in range(text.num_hidden_layers))
    for recipe, rest_told, sum_told in ((Recipe("mxfp4", 8), "61", "87"), (Recipe("mxfp4"), "114", "140")):
        whole = weights(config, recipe)
        chosen, bits = top_k * layers * expert_bytes(whole, config), "8 bits" if recipe.nonexpert_bits else "bf16"
        yield rounded(f"read per token: all else, {bits}", rest_told, whole.rest / GB, 0, " GB")
        if recipe.nonexpert_bits:
            yield rounded(f"read per token: {top_k} experts in each layer", "26", chosen / GB, 0, " GB")
        yield rounded(f"read per token, rest in {bits}", sum_told, (whole.rest + chosen) / GB, 0, " GB")
        read = read_per_token(whole, config)
        unread = {name: whole.parts[name] - read[name] for name in (EMBEDDING, VISION, PROJECTOR)}
        reason = "of the embedding a token reads one row, of the vision part nothing: " + ", ".join(
            f"{nbytes / GB:.2f} GB of the {name}" for name, nbytes in unread.items()
        )
        yield rounded("  without what a text token does not read", sum_told, sum(read.values()) / GB, 0, " GB", reason)


def node_claims(config: K3Config, workspace_gb: float) -> Iterator[Claim]:
    counts, spark = parameters(config), machines()["spark-1"]
    held = caches(config, RELEASED_CONTEXT)
    counted = steps(spark, weights(config, Recipe("mxfp4")), config, held, counts, workspace_gb)
    yield rounded("4 bits flat", "1.4", counted[0].needed / TB, 1, " TB")
    told = "2.8 T parameters in 4 bits, in DGX Sparks"
    exact = ceil(counted[0].needed / counted[0].node)
    yield Claim(told, "11", str(exact), exact == 11)
    by_bytes, by_layers = counted[-2].nodes, counted[-1].nodes
    found = f"{by_bytes} cut anywhere, {by_layers} in whole layers"
    agrees = by_bytes is not None and by_layers is not None and 14 <= by_bytes <= by_layers <= 16
    reason = "it depends on the memory kept free: see the steps and the assumptions"
    yield Claim("realistically", "14-16", found, agrees, "" if agrees else reason)
