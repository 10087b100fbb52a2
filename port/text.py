"""The text tower: layers around attention residuals, and the language model's head (K3.md §6, §11)."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from port.activation import gated_activation
from port.attn_res import mix, starts_block
from port.cache import Cache, KDACache, MLACache
from port.kda import KimiDeltaAttention
from port.linear import Linear, unset
from port.mla import GatedMLA
from port.mlp import GatedMLP
from port.moe import LatentMoE
from port.norm import RMSNorm
from port.padding import zero_padding
from reference.checkpoint import ExpertFormat
from reference.config import TextConfig
from reference.errors import InputError
from reference.taps import tap

Blocks = Sequence[mx.array]


class Embedding(nn.Module):
    """The table of token embeddings, ``weight`` [vocab, hidden]."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = unset(vocab, hidden)

    def __call__(self, input_ids: mx.array) -> mx.array:
        """input_ids [B, T], already checked -> [B, T, hidden]."""
        return self.weight[input_ids]


class DecoderLayer(nn.Module):
    """One layer: attention and MLP, each on its own mix of the blocks and the prefix sum (§6)."""

    def __init__(self, text_config: TextConfig, layer: int, expert_format: ExpertFormat) -> None:
        super().__init__()
        self.text_config, self.layer = text_config, layer
        hidden, eps = text_config.hidden_size, text_config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.self_attn = KimiDeltaAttention(text_config) if text_config.is_kda(layer) else GatedMLA(text_config)
        if text_config.is_moe(layer):
            self.block_sparse_moe = LatentMoE(text_config, expert_format)
        else:
            self.mlp = GatedMLP(hidden, text_config.intermediate_size, gated_activation(text_config))
        if text_config.attn_res_block_size:
            self.self_attention_res_norm, self.self_attention_res_proj = RMSNorm(hidden, eps), Linear(hidden, 1)
            self.mlp_res_norm, self.mlp_res_proj = RMSNorm(hidden, eps), Linear(hidden, 1)

    def attention_input(self, prefix_sum: mx.array, blocks: Blocks) -> mx.array:
        """What the attention reads: the normed mix of ``blocks`` and ``prefix_sum``, [B, T, hidden] each (step 1)."""
        if self.text_config.attn_res_block_size and len(blocks):
            prefix_sum = _mix(prefix_sum, blocks, self.self_attention_res_norm, self.self_attention_res_proj)
        return tap(self, "self_attn.input", self.input_layernorm(prefix_sum))

    def attend(self, x: mx.array, token_mask: mx.array | None, cache_entry: KDACache | MLACache | None) -> mx.array:
        """The attention of this layer on its normed input x [B, T, hidden]."""
        return tap(self, "self_attn.output", self.self_attn(x, token_mask, cache_entry))

    def mlp_input(self, prefix_sum: mx.array, blocks: Blocks) -> mx.array:
        """What the MLP reads: the normed mix of ``blocks`` and ``prefix_sum`` (step 4)."""
        if self.text_config.attn_res_block_size:
            prefix_sum = _mix(prefix_sum, blocks, self.mlp_res_norm, self.mlp_res_proj)
        return tap(self, "mlp.input", self.post_attention_layernorm(prefix_sum))

    def feed_forward(self, x: mx.array) -> mx.array:
        """The dense or routed MLP of this layer on its normed input x [B, T, hidden]."""
        y = self.block_sparse_moe(x, self) if self.text_config.is_moe(self.layer) else self.mlp(x)
        return tap(self, "mlp.output", y)

    def __call__(
        self,
        prefix_sum: mx.array,
        blocks: Blocks,
        token_mask: mx.array | None = None,
        cache_entry: KDACache | MLACache | None = None,
    ) -> tuple[mx.array, list[mx.array]]:
        """(prefix sum, blocks) before this layer -> those after it; ``blocks`` itself is not changed."""
        attended = self.attend(self.attention_input(prefix_sum, blocks), token_mask, cache_entry)
        block_size = self.text_config.attn_res_block_size
        if block_size and starts_block(self.layer, block_size):
            blocks, prefix_sum = [*blocks, prefix_sum], attended
        else:
            blocks, prefix_sum = list(blocks), prefix_sum + attended
        prefix_sum = prefix_sum + self.feed_forward(self.mlp_input(prefix_sum, blocks))
        return tap(self, "output", prefix_sum), blocks


class TextModel(nn.Module):
    """Embedding, layers, and the last mix and norm."""

    def __init__(self, text_config: TextConfig, expert_format: ExpertFormat) -> None:
        super().__init__()
        self.text_config = config = text_config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = Embedding(config.vocab_size, hidden)
        self.layers = [DecoderLayer(config, layer, expert_format) for layer in range(config.num_hidden_layers)]
        self.norm = RMSNorm(hidden, eps)
        if config.attn_res_block_size:
            self.output_attn_res_norm, self.output_attn_res_proj = RMSNorm(hidden, eps), Linear(hidden, 1)

    def embed(self, input_ids: mx.array) -> mx.array:
        """Embeddings [B, T, hidden] of input_ids [B, T]; raises InputError for an id outside the vocabulary."""
        check_ids(input_ids, self.text_config.vocab_size)
        return tap(self, "embed_tokens.output", self.embed_tokens(input_ids))

    def output(self, prefix_sum: mx.array, blocks: Blocks) -> mx.array:
        """The normed mix after the last layer, [B, T, hidden]."""
        if self.text_config.attn_res_block_size:
            prefix_sum = _mix(prefix_sum, blocks, self.output_attn_res_norm, self.output_attn_res_proj)
        return tap(self, "norm.output", self.norm(prefix_sum))

    def __call__(self, embeddings: mx.array, token_mask: mx.array | None = None, cache: Cache | None = None) -> mx.array:
        """embeddings [B, T, hidden] -> the input of the head [B, T, hidden]; ``cache`` is updated in place."""
        prefix_sum, blocks = embeddings, []
        for number, layer in enumerate(self.layers):
            entry = None if cache is None else cache.layers[number]
            prefix_sum, blocks = layer(prefix_sum, blocks, token_mask, entry)
        if cache is not None:
            cache.length += embeddings.shape[1]
        return self.output(prefix_sum, blocks)


class LanguageModel(nn.Module):
    """The text tower with its head."""

    def __init__(self, text_config: TextConfig, expert_format: ExpertFormat) -> None:
        super().__init__()
        self.model = TextModel(text_config, expert_format)
        self.lm_head = Linear(text_config.hidden_size, text_config.vocab_size)

    def __call__(
        self,
        input_ids: mx.array | None = None,
        inputs_embeds: mx.array | None = None,
        token_mask: mx.array | None = None,
        cache: Cache | None = None,
    ) -> mx.array:
        """Logits [B, T, vocab] in model dtype for new tokens, given as ids [B, T] or embeddings [B, T, hidden].

        ``token_mask`` [B, T] bool is True at real new tokens. Raises InputError for ids outside the vocabulary, for
        both or neither of ids and embeddings, and for a mask or cache of another shape.
        """
        if (input_ids is None) == (inputs_embeds is None):
            found = "neither" if input_ids is None else "both"
            raise InputError("model", "input", "one of input_ids and inputs_embeds", found, "give exactly one")
        embeddings = self.model.embed(input_ids) if inputs_embeds is None else inputs_embeds
        check_shapes(embeddings, token_mask, cache)
        if token_mask is not None:
            # Every module keeps padding apart by itself; zeros here also spare the MLPs NaN and infinity.
            embeddings = zero_padding(embeddings, token_mask)
        logits = self.lm_head(self.model(embeddings, token_mask, cache))
        if cache is not None:
            # Until it is computed, an entry would hold on to the whole graph that leads to it.
            mx.eval(logits, cache.arrays())
        return logits


def check_ids(input_ids: mx.array, vocab_size: int) -> None:
    """InputError unless all ids are integers in [0, vocab_size): MLX would read past the table without a word."""
    mend = "tokenize with this checkpoint's tokenizer"
    if input_ids.ndim != 2 or not mx.issubdtype(input_ids.dtype, mx.integer) or not input_ids.size:
        found = f"{input_ids.dtype} {list(input_ids.shape)}"
        raise InputError("model", "input_ids", "at least one token per row, integers [B, T]", found, mend)
    low, high = mx.min(input_ids).item(), mx.max(input_ids).item()
    if low < 0 or high >= vocab_size:
        raise InputError("model", "input_ids", f"ids from 0 to {vocab_size - 1}", low if low < 0 else high, mend)


def check_shapes(embeddings: mx.array, token_mask: mx.array | None, cache: Cache | None) -> None:
    """InputError unless mask and cache belong to embeddings [B, T, hidden]."""
    if embeddings.ndim != 3 or not embeddings.size:
        found = list(embeddings.shape)
        raise InputError("model", "inputs_embeds", "[B, T, hidden] with T >= 1", found, "give at least one token")
    batch, tokens, _ = embeddings.shape
    if token_mask is not None and token_mask.shape != (batch, tokens):
        mend = "mask the new tokens, one value each"
        raise InputError("model", "attention_mask", [batch, tokens], list(token_mask.shape), mend)
    if cache is not None and cache.arrays()[0].shape[0] != batch:
        found, mend = f"{cache.arrays()[0].shape[0]} rows", "use a cache for the same rows"
        raise InputError("model", "cache", f"{batch} rows", found, mend)


def _mix(prefix_sum: mx.array, blocks: Blocks, norm: RMSNorm, proj: Linear) -> mx.array:
    return mix(prefix_sum, blocks, norm.weight, proj.weight, norm.eps)
