"""How far a port may be from the truth: a measured noise side times a factor, each with its reason.

``allowed = factor · max(noise, floor)``, where noise is the error of the reference itself in the same dtype, on the
same input, against float64. Nothing here is a guess about rounding.
"""

from __future__ import annotations

from typing import NamedTuple

EPSILON = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float64": 2.0**-53}
"""The largest relative rounding error of each dtype."""

FLOOR = {"float32": 4 * EPSILON["float32"], "bfloat16": EPSILON["bfloat16"]}
"""Below this noise a ratio means nothing. A float32 quantity is the result of several roundings; a bfloat16 one is
rounded once, at the end, from float32."""


class Tolerance(NamedTuple):
    """``factor`` per model dtype; ``floor`` scales FLOOR."""

    factor: dict[str, float]
    floor: float
    reason: str

    def allowed(self, dtype: str, noise: float, stored: str) -> float:
        """``dtype`` is the model's, ``stored`` the one in which the reference keeps this quantity.

        A quantity kept in float32 inside a bfloat16 model (a gate, a state, a routing weight) has float32's floor: a
        port that squeezes it through bfloat16 must not hide behind the model's dtype.
        """
        return self.factor[dtype] * max(noise, self.floor * FLOOR[stored])


def _row(reason: str, float32: float = 4.0, bfloat16: float = 2.0, floor: float = 1.0) -> Tolerance:
    return Tolerance({"float32": float32, "bfloat16": bfloat16}, floor, reason)


ISOLATED: dict[str, Tolerance] = {
    "embed_tokens": _row("a lookup: the stored value, exactly", floor=0.0),
    "norm": _row("one mean of squares and one product; summation order differs"),
    "activation": _row("two tanh and one sigmoid from two maths libraries, each right to an ulp or two"),
    "short_conv": _row("a sum of K products and a SiLU"),
    "kda.gate": _row("a product of two low-rank matrices, one exponential inside a sigmoid: amplified by exp(A_log)"),
    "kda.recurrence": _row("T steps that each forget; the chunked form sums in another order", float32=6.0),
    "kda.output": _row("norm over the head, gate, and one product over H·D"),
    "mla.query": _row("two products with a norm between"),
    "mla.latent": _row("one product and a norm"),
    "mla.attention": _row("a softmax over T keys; absorbing W_kvb changes the order of three products", float32=6.0),
    "mla.output": _row("a gate and one product over H·v_head_dim"),
    "attn_res": _row("a softmax over at most nine sources: the error of a score is amplified by its size", float32=6.0),
    "attn_res.output": _row("as attn_res, then one norm", float32=6.0),
    "mlp": _row("three products around SiTU"),
    "router": _row("one product in float32 over the hidden size, a sigmoid, a division by the sum of k"),
    "latent_moe": _row("two products around the norm of a sum of k experts, plus the shared MLP"),
    "experts": _row("k experts summed in float32 in another order"),
    "saliency": _row("a sum of squares, then a sum over tokens in another order"),
    "vision.patch_embed": _row("one product over a patch, plus four positions weighed in float64 and rounded once"),
    "vision.attention": _row("a softmax over all patches of an item", float32=6.0),
    "vision.block": _row("attention and an MLP around two norms"),
    "vision.merge": _row("one norm and a mean over frames"),
    "projector": _row("two products around erf, then a norm"),
    "merge": _row("rows are moved, not computed: exact", floor=0.0),
    "lm_head": _row("one product over the hidden size"),
}
"""By module: the port is given the reference's own input."""

CHAINED = _row(
    "rounding grows along the layers, and right programs draw it independently: over the whole catalogue (36,664 taps) "
    "the MLX port comes to at most 5.5 times the worse of the reference's two draws, 4.0 times at 99.99 % of the taps",
    float32=8.0,
    bfloat16=2.0,
)
"""For every tap of a whole pass. The noise is the worse of two draws, the reference in its two forms: against one draw
alone the same port comes to 8.3 times (6.2 at 99.99 %), where that draw was lucky."""

GOLDEN_ISOLATED_FLOAT32 = 1e-5
"""Against the authors' own float32 output on the authors' own input; right ports come to 1e-7 … 2e-6."""

GOLDEN_CHAINED_FLOAT32 = 2e-4
"""Against the authors' own float32 pass; right ports come to 1e-6 … 9e-5, and rounding grows along the layers."""

GOLDEN_AMPLIFIED_FLOAT32 = 1e-3
"""How far the authors' own float32 may be from float64 where rounding is amplified (3.6e-4 on one padded run); a golden
trace further off than that says that the reference is wrong, and float64 is not asked."""

GOLDEN_VISION_FLOAT32 = 5e-6
"""Tower, projector and merged embeddings against the authors' own float32; right ports come to 2e-7 … 4e-7."""

TIE_FLOOR = 8 * EPSILON["float32"]
"""Biased router scores are of size one; two that are closer than a few float32 roundings are tied for any port."""
