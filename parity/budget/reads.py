"""What decoding one token reads, and what a context costs (K3.md §4, §5, §7, §11)."""

from __future__ import annotations

from dataclasses import dataclass

from parity.budget.components import EMBEDDING, PROJECTOR, ROUTED, VISION
from parity.budget.sizes import Weights
from reference.config import K3Config, TextConfig

BF16, F32 = 2, 4


@dataclass(frozen=True)
class Caches:
    """Bytes that one sequence holds: ``kda_state`` and ``conv_state`` whatever its length, ``mla`` for ``context``
    tokens in the compressed form (latent and shared key), ``mla_expanded`` if full keys and values were kept."""

    context: int
    kda_state: int
    conv_state: int
    mla: int
    mla_expanded: int

    @property
    def nbytes(self) -> int:
        return self.kda_state + self.conv_state + self.mla


def kda_state_bytes(text: TextConfig) -> int:
    """One KDA layer's state: [H, D, D] in float32."""
    linear = text.linear_attn_config
    return linear.num_heads * linear.head_dim**2 * F32


def conv_state_bytes(text: TextConfig) -> int:
    """One KDA layer's last inputs of the convolutions of q, k and v, in bf16."""
    linear = text.linear_attn_config
    return 3 * (linear.short_conv_kernel_size - 1) * linear.width * BF16


def mla_token_bytes(text: TextConfig) -> int:
    """One token in one MLA layer's cache: the latent and the key that all heads share, in bf16."""
    return (text.kv_lora_rank + text.qk_rope_head_dim) * BF16


def mla_expanded_token_bytes(text: TextConfig) -> int:
    """The same token as full keys and values of every head, in bf16."""
    return text.num_attention_heads * (text.query_head_dim + text.v_head_dim) * BF16


def caches(config: K3Config, context: int) -> Caches:
    """What one sequence of ``context`` tokens holds."""
    text = config.text_config
    kda = sum(text.is_kda(layer) for layer in range(text.num_hidden_layers))
    mla = text.num_hidden_layers - kda
    return Caches(
        context,
        kda * kda_state_bytes(text),
        kda * conv_state_bytes(text),
        mla * context * mla_token_bytes(text),
        mla * context * mla_expanded_token_bytes(text),
    )


def layer_caches(config: K3Config, context: int) -> tuple[int, ...]:
    """Bytes of each layer's cache; they add up to ``caches(...).nbytes``."""
    text = config.text_config
    kda, mla = kda_state_bytes(text) + conv_state_bytes(text), context * mla_token_bytes(text)
    return tuple(kda if text.is_kda(layer) else mla for layer in range(text.num_hidden_layers))


def read_per_token(whole: Weights, config: K3Config) -> dict[str, int]:
    """Component -> bytes of weights that one text token reads.

    Of the routed experts those that it chose, of the embedding one row, of tower and projector nothing, all else
    whole.
    """
    text = config.text_config
    shares = {
        ROUTED: (text.num_experts_per_token, whole.kept),
        EMBEDDING: (1, text.vocab_size),
        VISION: (0, 1),
        PROJECTOR: (0, 1),
    }
    read = {}
    for component, nbytes in whole.parts.items():
        part, of = shares.get(component, (1, 1))
        read[component] = nbytes * part // of
    return dict(sorted(read.items(), key=lambda item: -item[1]))


def state_traffic(held: Caches) -> int:
    """Bytes that a token moves in the caches: the KDA states are read and written back, the MLA cache is read."""
    return 2 * (held.kda_state + held.conv_state) + held.mla


def hop_bytes(text: TextConfig) -> int:
    """What passes from one layer to the next for one token: the prefix sum and all block vectors, in bf16 (§6)."""
    block = text.attn_res_block_size
    blocks = -(-text.num_hidden_layers // block) if block else 0
    return (1 + blocks) * text.hidden_size * BF16
