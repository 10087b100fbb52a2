"""Faults of the way from a file to a model: layer kinds, names, layouts, ties (K3.md §1, §2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parity.fault_catalogue.patches import called, exchanged, stored
from parity.faults import Fault


def zero_based(text_config: Any) -> Any:
    """A configuration that says, counted from 1, what the true one would say counted from 0."""
    linear = text_config.linear_attn_config
    shifted = {name: tuple(i + 1 for i in getattr(linear, name)) for name in ("kda_layers", "full_attn_layers")}
    return text_config.model_copy(update={"linear_attn_config": linear.model_copy(update=shifted)})


def one_more_dense_layer(text_config: Any) -> Any:
    return text_config.model_copy(update={"first_k_dense_replace": text_config.first_k_dense_replace + 1})


def without_attn_res(text_config: Any) -> Any:
    return text_config.model_copy(update={"attn_res_block_size": None})


def built_from(change: Callable[[Any], Any]) -> dict[str, Callable]:
    """Both twins' layers, and the MLX port's table of names, from another configuration."""

    def layer(original: Callable, package: str) -> Callable:
        return lambda self, text_config, *rest: original(self, change(text_config), *rest)

    def section(original: Callable, package: str) -> Callable:
        return lambda text_config, *rest: original(change(text_config), *rest)

    return {"text.DecoderLayer.__init__": layer, "weight_table.layer_sections": section}


def gate_overwritten(name: str, array: np.ndarray) -> np.ndarray:
    """What a layer's own initialisation would leave there."""
    return array * 0 if name.endswith((".A_log", ".dt_bias")) else array


def kernel_reversed(name: str, array: np.ndarray) -> np.ndarray:
    return array[..., ::-1] if "conv1d" in name else array


def heads_last(name: str, array: np.ndarray) -> np.ndarray:
    """Rows of a projection laid out channel first: [D, H] where [H, D] is stored; 16 channels to a head at least."""
    if not name.endswith("self_attn.f_b_proj.weight"):
        return array
    channels = array.shape[1]
    return array.reshape(-1, channels, array.shape[1]).swapaxes(0, 1).reshape(array.shape)


def tied(name: str) -> str:
    return name.replace("lm_head.weight", "model.embed_tokens.weight")


def next_experts(name: str) -> str:
    """Every expert's tensors under the number before."""
    head, found, tail = name.partition(".experts.")
    if not found:
        return name
    number, _, rest = tail.partition(".")
    return f"{head}.experts.{int(number) + 1}.{rest}"


FAULTS: tuple[Fault, ...] = (
    Fault(
        "F59b",
        "layer_kinds",
        "the layer lists count from 0",
        "the model does not load, or loads layers of the wrong kind",
        built_from(zero_based),
    ),
    Fault(
        "F59c",
        "checkpoint",
        "one more layer is dense",
        "the model does not load",
        built_from(one_more_dense_layer),
        also=("mlp", "block_sparse_moe"),
    ),
    Fault(
        "F60",
        "checkpoint",
        "attention residuals are an option of training",
        "the model does not load, or loads without its mixes",
        built_from(without_attn_res),
    ),
    Fault(
        "F04",
        "kda.gate",
        "gate parameters are set when a layer is built",
        "the values of the file are overwritten; noise",
        stored(gate_overwritten),
    ),
    Fault("F30", "short_conv", "kernels are stored newest first", "another filter", stored(kernel_reversed)),
    Fault(
        "F08e",
        "kda.gate",
        "the decay's projection is laid out channel first",
        "decays at the wrong channels",
        stored(heads_last),
    ),
    Fault(
        "F74",
        "short_conv",
        "q and k are interchangeable",
        "reads with what should write",
        exchanged("self_attn.q_conv1d", "self_attn.k_conv1d"),
    ),
    Fault(
        "F76b",
        "attn_res",
        "the two norms of a layer are named by their order in older models",
        "inputs of both halves wrong",
        exchanged("input_layernorm", "post_attention_layernorm"),
    ),
    Fault(
        "F75",
        "attn_res",
        "the mixes before attention and before the MLP share a prefix",
        "each half reads with the other's weights",
        exchanged("self_attention_res_", "mlp_res_"),
    ),
    Fault("F78", "lm_head", "the head is tied to the embedding", "another next token", called(tied)),
    Fault(
        "F86",
        "experts",
        "experts are renumbered without their router rows",
        "experts paired with others' scores",
        called(next_experts),
    ),
    Fault(
        "F80",
        "mlp",
        "gate and up are named the other way round",
        "another function, equal where both inputs are equal",
        exchanged("mlp.gate_proj", "mlp.up_proj"),
    ),
    Fault(
        "F80b",
        "latent_moe",
        "the shared experts' gate and up are named the other way round",
        "another function, equal where both inputs are equal",
        exchanged("shared_experts.gate_proj", "shared_experts.up_proj"),
    ),
)
