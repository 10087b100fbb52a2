"""Faults that no mini model can show: they begin at the ninth block, the 513th expert, or heads of K3's own width.

They are not in ``FAULTS``, whose every entry is caught on a mini checkpoint; ``k3-parity check --layers`` catches them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parity.fault_catalogue.patches import around, instead
from parity.faults import Fault, library

BANK_SLOTS, EXPERT_NUMBERS = 7, 512


def overwritten_slot(
    original: Callable, package: str, self, prefix_sum, blocks, token_mask=None, cache_entry=None
) -> Any:
    """The bank was made for seven blocks: the one of layer 84 goes into the last slot."""
    after, bank = original(self, prefix_sum, blocks, token_mask, cache_entry)
    return after, [*bank[: BANK_SLOTS - 1], bank[-1]] if len(bank) > BANK_SLOTS else bank


def number_in_nine_bits(original: Callable, package: str, self, z, indices) -> Any:
    return original(self, z, library(package).where(indices >= EXPERT_NUMBERS, indices - EXPERT_NUMBERS, indices))


def scale_outside_the_exponent(package: str, q, k, v, scale, allowed) -> Any:
    """``exp(q·k)^scale`` for ``exp(scale · q·k)`` over the channels that have been through a norm: the same function
    as long as q·k stays below 88. Both come from norms, so that it is their width that decides, not the input's size.
    """
    lib, normed = library(package), v.shape[-1]

    def products(part: slice) -> Any:
        return lib.einsum("bthd,blhd->bhtl", q[..., part], k[..., part])

    powers = lib.exp(products(slice(normed))) ** scale * lib.exp(products(slice(normed, None)) * scale)
    weights = lib.where(allowed[:, None], powers, lib.zeros_like(powers))
    return lib.einsum("bhtl,blhv->bthv", weights / weights.sum(-1)[..., None], v)


WIDTH_FAULTS: tuple[Fault, ...] = (
    Fault(
        "W01",
        "attn_res",
        "the bank has seven slots: the eighth block overwrites the seventh",
        "nothing up to layer 83; from layer 84 on another mix",
        {"text.DecoderLayer.add_attention": around(overwritten_slot)},
        case="k3",
    ),
    Fault(
        "W02",
        "experts",
        "an expert's number is kept in nine bits: 512 and beyond take the weights of number − 512",
        "two experts in five are other ones; fluent text of lower quality",
        {"moe.Experts.outputs": around(number_in_nine_bits)},
        case="k3",
    ),
    Fault(
        "W03",
        "mla.attention",
        "the scale is taken out of the exponent: exp(q·k) overflows with 96 heads of 128 normed channels",
        "inf / inf = NaN in a few heads, from the first full-attention layer on",
        {"mla.attention": instead(scale_outside_the_exponent)},
        case="k3",
    ),
)
