"""The text tower: decoder layers, attention residuals between them, the language model head (K3.md §6, §11)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from reference.activation import gated_activation
from reference.attn_res import mix, starts_block
from reference.cache import Cache, CacheEntry
from reference.checkpoint import ExpertFormat
from reference.config import TextConfig
from reference.errors import InputError
from reference.kda import KimiDeltaAttention
from reference.linear import Embedding, Linear
from reference.mla import GatedMLA
from reference.mlp import GatedMLP
from reference.moe import LatentMoE
from reference.norm import RMSNorm
from reference.padding import zero_padding
from reference.taps import tap


class DecoderLayer(nn.Module):
    """One layer: attention (KDA or MLA), then a dense MLP or routed experts, each behind its own mix and norm.

    ``prefix_sum`` [B, T, hidden] and ``blocks`` (a list of the same shape) are all that passes between layers.
    """

    def __init__(self, text_config: TextConfig, layer: int, expert_format: ExpertFormat) -> None:
        super().__init__()
        hidden, self.eps = text_config.hidden_size, text_config.rms_norm_eps
        self.block_size = text_config.attn_res_block_size
        self.layer, self.is_moe = layer, text_config.is_moe(layer)
        self.input_layernorm = RMSNorm(hidden, self.eps)
        self.self_attn = KimiDeltaAttention(text_config) if text_config.is_kda(layer) else GatedMLA(text_config)
        self.post_attention_layernorm = RMSNorm(hidden, self.eps)
        if self.is_moe:
            self.block_sparse_moe = LatentMoE(text_config, expert_format)
        else:
            self.mlp = GatedMLP(hidden, text_config.intermediate_size, gated_activation(text_config))
        if self.block_size:
            self.self_attention_res_norm = RMSNorm(hidden, self.eps)
            self.self_attention_res_proj = Linear(hidden, 1)
            self.mlp_res_norm = RMSNorm(hidden, self.eps)
            self.mlp_res_proj = Linear(hidden, 1)

    def attention_input(self, prefix_sum: Tensor, blocks: list[Tensor]) -> Tensor:
        """What attention reads: the mix, or the prefix sum while there are no blocks, after ``input_layernorm``."""
        mixed = prefix_sum
        if blocks:
            mixed = mix(
                prefix_sum, blocks, self.self_attention_res_norm.weight, self.self_attention_res_proj.weight, self.eps
            )
        return tap(self, "self_attn.input", self.input_layernorm(mixed))

    def attend(self, x: Tensor, token_mask: Tensor | None = None, cache_entry: CacheEntry | None = None) -> Tensor:
        """Attention on its normed input [B, T, hidden]."""
        return tap(self, "self_attn.output", self.self_attn(x, token_mask, cache_entry))

    def mlp_input(self, prefix_sum: Tensor, blocks: list[Tensor]) -> Tensor:
        """What the MLP reads: the mix, after ``post_attention_layernorm``."""
        mixed = prefix_sum
        if self.block_size:
            mixed = mix(prefix_sum, blocks, self.mlp_res_norm.weight, self.mlp_res_proj.weight, self.eps)
        return tap(self, "mlp.input", self.post_attention_layernorm(mixed))

    def feed_forward(self, x: Tensor) -> Tensor:
        """The dense MLP, or the routed and shared experts, on their normed input [B, T, hidden]."""
        return tap(self, "mlp.output", self.block_sparse_moe(x, self) if self.is_moe else self.mlp(x))

    def add_attention(
        self,
        prefix_sum: Tensor,
        blocks: list[Tensor],
        token_mask: Tensor | None = None,
        cache_entry: CacheEntry | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The first half of a layer, up to what ``mlp_input`` reads. The caller's list is not changed."""
        attended = self.attend(self.attention_input(prefix_sum, blocks), token_mask, cache_entry)
        if self.block_size and starts_block(self.layer, self.block_size):
            return attended, [*blocks, prefix_sum]
        return prefix_sum + attended, blocks

    def forward(
        self,
        prefix_sum: Tensor,
        blocks: list[Tensor],
        token_mask: Tensor | None = None,
        cache_entry: CacheEntry | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """One layer of §6: (prefix_sum, blocks) -> (prefix_sum, blocks). The caller's list is not changed."""
        prefix_sum, blocks = self.add_attention(prefix_sum, blocks, token_mask, cache_entry)
        prefix_sum = prefix_sum + self.feed_forward(self.mlp_input(prefix_sum, blocks))
        return tap(self, "output", prefix_sum), blocks


class TextModel(nn.Module):
    """The embedding, the layers, and the final mix and norm."""

    def __init__(self, text_config: TextConfig, expert_format: ExpertFormat) -> None:
        super().__init__()
        hidden, layers = text_config.hidden_size, range(text_config.num_hidden_layers)
        self.text_config, self.eps = text_config, text_config.rms_norm_eps
        self.embed_tokens = Embedding(text_config.vocab_size, hidden)
        self.layers = nn.ModuleList(DecoderLayer(text_config, layer, expert_format) for layer in layers)
        self.norm = RMSNorm(hidden, self.eps)
        if text_config.attn_res_block_size:
            self.output_attn_res_norm = RMSNorm(hidden, self.eps)
            self.output_attn_res_proj = Linear(hidden, 1)

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids [B, T] int -> [B, T, hidden]; raises InputError on an id outside the vocabulary."""
        check_token_ids(input_ids, self.text_config.vocab_size)
        return tap(self, "embed_tokens.output", self.embed_tokens(input_ids))

    def output(self, prefix_sum: Tensor, blocks: list[Tensor]) -> Tensor:
        """The last mix, then the last norm: what ``lm_head`` reads."""
        mixed = prefix_sum
        if self.text_config.attn_res_block_size:
            mixed = mix(
                prefix_sum, blocks, self.output_attn_res_norm.weight, self.output_attn_res_proj.weight, self.eps
            )
        return tap(self, "norm.output", self.norm(mixed))

    def forward(self, inputs_embeds: Tensor, token_mask: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """inputs_embeds [B, T, hidden] -> [B, T, hidden]; padded positions are zeroed before anything reads them."""
        prefix_sum, blocks = inputs_embeds, []
        if token_mask is not None:
            prefix_sum = zero_padding(prefix_sum, token_mask)
        entries = cache.layers if cache is not None else [None] * len(self.layers)
        for layer, entry in zip(self.layers, entries, strict=True):
            prefix_sum, blocks = layer(prefix_sum, blocks, token_mask, entry)
        if cache is not None:
            cache.length += inputs_embeds.shape[1]
        return self.output(prefix_sum, blocks)


class LanguageModel(nn.Module):
    """The text tower with its head."""

    def __init__(self, text_config: TextConfig, expert_format: ExpertFormat) -> None:
        super().__init__()
        self.model = TextModel(text_config, expert_format)
        self.lm_head = Linear(text_config.hidden_size, text_config.vocab_size)

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        token_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Either input_ids [B, T] int or inputs_embeds [B, T, hidden] -> logits [B, T, vocab] in the model dtype.

        token_mask [B, T] bool says which of these new tokens are real; None means all. ``cache`` is brought up to date.
        Raises InputError if neither or both inputs are given, on an id outside the vocabulary, or if batch sizes or
        the mask's shape do not match.
        """
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise InputError("inputs", "input_ids and inputs_embeds", "one of the two", given, "give exactly one")
        embeddings = self.model.embed(input_ids) if inputs_embeds is None else inputs_embeds
        check_inputs(embeddings, self.lm_head.weight.dtype, token_mask, cache)
        return self.lm_head(self.model(embeddings, token_mask, cache))


def check_token_ids(input_ids: Tensor, vocab_size: int) -> None:
    """Raise InputError unless every id is in [0, vocab_size); a negative one would otherwise count from the end."""
    if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        found = f"{list(input_ids.shape)} of {input_ids.dtype}"
        raise InputError("input_ids", "shape and dtype", "integers [B, T]", found, "give one row of ids per sequence")
    outside = (input_ids < 0) | (input_ids >= vocab_size)
    if outside.any():
        where = outside.nonzero()[0].tolist()
        found = f"{input_ids[tuple(where)]} at {where}"
        raise InputError("input_ids", "token id", f"ids in [0, {vocab_size})", found, "use this model's tokenizer")


def check_inputs(embeddings: Tensor, dtype: torch.dtype, token_mask: Tensor | None, cache: Cache | None) -> None:
    """Raise InputError where embeddings [B, T, hidden], mask or cache do not fit each other or the model's dtype."""
    batch, tokens = embeddings.shape[:2]
    if embeddings.dtype != dtype:
        raise InputError("inputs_embeds", "dtype", f"{dtype}", embeddings.dtype, "give the model's dtype")
    if token_mask is not None and token_mask.shape != (batch, tokens):
        mend = "give the mask of the new tokens only"
        raise InputError("token_mask", "shape", f"[{batch}, {tokens}]", list(token_mask.shape), mend)
    if cache is not None:
        first = next(cache.tensors())
        if (first.shape[0], first.dtype) != (batch, dtype):
            found, mend = f"{first.shape[0]} and {first.dtype}", "make a new cache for this batch and model"
            raise InputError("cache", "batch and dtype", f"{batch} and {dtype}", found, mend)
