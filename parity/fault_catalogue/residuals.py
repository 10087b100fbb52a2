"""Faults of attention residuals, of norms and of the two ends of the text tower (K3.md §3, §6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parity.fault_catalogue.patches import around, cast_like, given, instead, result, rounded_to_bfloat16
from parity.faults import Fault, library


def normalized(v: Any, eps: float, package: str) -> Any:
    return v * library(package).rsqrt((v * v).mean(-1)[..., None] + eps)


def of_normalized_sources(original: Callable, package: str, prefix_sum, blocks, norm_weight, proj_weight, eps) -> Any:
    sources = [cast_like(normalized(v, eps, package), v, package) for v in (*blocks, prefix_sum)]
    return original(sources[-1], sources[:-1], norm_weight, proj_weight, eps)


def scored_without_norm(package: str, sources, norm_weight, proj_weight, eps) -> Any:
    return library(package).softmax((sources * (norm_weight * proj_weight[0])).sum(-1), 0)


def without_the_prefix(original: Callable, package: str, prefix_sum, blocks, *rest) -> Any:
    if not len(blocks):
        return original(prefix_sum, blocks, *rest)
    return original(blocks[-1], list(blocks)[:-1], *rest)


def newest_block_lost(original: Callable, package: str, prefix_sum, blocks, *rest) -> Any:
    return original(prefix_sum, list(blocks)[:-1] if len(blocks) > 1 else blocks, *rest)


def with_attention_s_weights(original: Callable, package: str, self, prefix_sum, blocks) -> Any:
    if not self.block_size:
        return original(self, prefix_sum, blocks)
    right = self.mlp_res_norm, self.mlp_res_proj
    self.mlp_res_norm, self.mlp_res_proj = self.self_attention_res_norm, self.self_attention_res_proj
    try:
        return original(self, prefix_sum, blocks)
    finally:
        self.mlp_res_norm, self.mlp_res_proj = right


def plain_before_mlp(original: Callable, package: str, self, prefix_sum, blocks) -> Any:
    return original(self, prefix_sum, [])


def prefix_goes_on(
    original: Callable, package: str, self, prefix_sum, blocks, token_mask=None, cache_entry=None
) -> Any:
    """A new block begins with the old prefix sum still in it."""
    after, bank = original(self, prefix_sum, blocks, token_mask, cache_entry)
    return (after + prefix_sum if len(bank) > len(blocks) else after), bank


def norm_before_mix(original: Callable, package: str, self, prefix_sum, blocks) -> Any:
    return original(self, self.norm(prefix_sum), [self.norm(block) for block in blocks])


def one_plus(weight: Any) -> Any:
    return 1 + weight


FAULTS: tuple[Fault, ...] = (
    Fault(
        "F44",
        "attn_res.output",
        "the last norm reads the prefix sum, without a mix",
        "another next token; text still looks like text",
        {"text.TextModel.output": lambda original, package: lambda self, p, blocks: original(self, p, [])},
    ),
    Fault(
        "F45",
        "attn_res",
        "a new block goes on with the old prefix sum",
        "the stream of an ordinary model, with mixes on top",
        {"text.DecoderLayer.forward": around(prefix_goes_on)},
    ),
    Fault(
        "F46",
        "attn_res",
        "only the prefix sum passes from layer to layer",
        "sources missing after the first layer of a stage",
        {"attn_res.mix": given(blocks=lambda blocks: [])},
        also=("attn_res.output",),
    ),
    Fault(
        "F48",
        "attn_res",
        "the block size counts half layers",
        "blocks of twice the length",
        {"attn_res.starts_block": given(block_size=lambda size: 2 * size)},
    ),
    Fault(
        "F48b",
        "attn_res",
        "blocks begin one layer early",
        "the embedding is not a block of its own",
        {"attn_res.starts_block": given(layer=lambda layer: layer + 1)},
    ),
    Fault(
        "F48c",
        "attn_res.output",
        "the last mix comes after the last norm",
        "another next token",
        {"text.TextModel.output": around(norm_before_mix)},
    ),
    Fault(
        "F49",
        "attn_res",
        "what is mixed are the normalized sources",
        "inputs of another size; the norm after it hides part",
        {"attn_res.mix": around(of_normalized_sources)},
    ),
    Fault(
        "F49b",
        "attn_res",
        "sources are scored as they are, without a norm",
        "long sources win",
        {"attn_res.mix_weights": instead(scored_without_norm)},
    ),
    Fault(
        "F49c",
        "attn_res",
        "the prefix sum is no source",
        "the current block is invisible",
        {"attn_res.mix": around(without_the_prefix)},
    ),
    Fault(
        "F49d",
        "attn_res",
        "the newest block is complete and need not be read",
        "one source too few from the second block on",
        {"attn_res.mix": around(newest_block_lost)},
    ),
    Fault(
        "F49e",
        "attn_res",
        "one pair of mix weights serves the whole layer",
        "another mix before the MLP",
        {"text.DecoderLayer.mlp_input": around(with_attention_s_weights)},
    ),
    Fault(
        "F49f",
        "attn_res",
        "mixes stand before attention only",
        "the MLP reads the prefix sum alone",
        {"text.DecoderLayer.mlp_input": around(plain_before_mlp)},
    ),
    Fault(
        "F50",
        "attn_res",
        "the weights of the mix may be bfloat16",
        "small",
        {"attn_res.mix_weights": result(rounded_to_bfloat16)},
        hidden="the mix itself is rounded to bfloat16: weights rounded before it add no more than that",
    ),
    Fault(
        "F51",
        "norm",
        "the weight of a norm is stored as its distance from 1",
        "everything too large",
        {"norm.rms_norm": given(weight=one_plus)},
        also=("attn_res",),
    ),
    Fault(
        "F51b",
        "norm",
        "the norm takes the mean away first",
        "small where means are small",
        {"norm.rms_norm": given(x=lambda x: x - x.mean(-1)[..., None])},
    ),
    Fault(
        "F51c",
        "norm",
        "every norm's epsilon is 1e-6",
        "only rows of tiny size",
        {"norm.rms_norm": given(eps=1e-6)},
        also=("latent_moe",),
    ),
    Fault(
        "F51d",
        "embed_tokens",
        "embeddings are multiplied by the root of the hidden size",
        "the first block weighs too much",
        {"linear.Embedding.forward": result(lambda x, package: x * x.shape[-1] ** 0.5)},
    ),
)
