"""transformers' Kimi-Linear as a port under test: K3's parent architecture, so only checkpoints with its settings.

The checkpoint is written in the form that its loader reads: the text tower alone, experts unpacked to bfloat16 (which
holds MXFP4 exactly), ``A_log`` as [1, 1, heads, 1] without K3's padding. The loading itself is the package's own.
"""

from __future__ import annotations

import importlib
import inspect
import json
import tempfile
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from parity.ports.adapter import TreePort
from parity.ports.reference import Torch
from parity.ports.transformers_functions import FUNCTIONS
from parity.ports.watch import Watch
from parity.protocol import TEXT_KINDS, Capabilities, Unsupported
from parity.quantities import TEXT_MODEL
from reference.config import K3Config, TextConfig
from reference.mxfp4 import unpack
from reference.shards import Shards

DELTA = {"self_attn." + name for name in ("q", "k", "v", "log_decay", "beta", "core", "state", "output", "input")}
LATENT = {"self_attn." + name for name in ("query", "latent", "key_rope", "attention")}
EXPERTS = {"router.indices", "router.weights", "moe.routed", "mlp.input", "mlp.output", "output"}
TOP = {f"{TEXT_MODEL}embed_tokens.output", f"{TEXT_MODEL}norm.output", "logits"}
LANGUAGE, PACKED = "language_model.", ".weight_packed"
SURE = 1e4
"""More than any biased router score: an expert with this on top of its bias is chosen."""


def foreign_settings(text: TextConfig) -> list[str]:
    """The settings of this configuration that Kimi-Linear does not have."""
    has = {
        "gate_lower_bound": text.linear_attn_config.gate_lower_bound is not None,
        "use_full_rank_gate": bool(text.linear_attn_config.use_full_rank_gate),
        "mla_use_output_gate": bool(text.mla_use_output_gate),
        "attn_res_block_size": bool(text.attn_res_block_size),
        "routed_expert_hidden_size": bool(text.routed_expert_hidden_size),
        "hidden_act situ": text.hidden_act != "silu",
        "router other than sigmoid": text.moe_router_activation_func != "sigmoid",
        "no shared experts": not text.num_shared_experts,
        "moe_layer_freq": text.moe_layer_freq != 1,
    }
    return [name for name, present in has.items() if present]


def write_as_kimi_linear(source: Path, target: Path) -> None:
    """``source`` in the form that transformers' loader reads."""
    from safetensors.torch import save_file

    shards, to_torch, tensors = Shards(source), Torch().to_array, {}
    heads = shards.config.text_config.linear_attn_config.num_heads
    for name in shards.names:
        short = name.removeprefix(LANGUAGE)
        if short == name or name.endswith(".weight_scale"):
            continue
        array = shards.read(name)
        if name.endswith(PACKED):
            scale = shards.read(name.removesuffix(PACKED) + ".weight_scale")
            short, array = short.removesuffix(PACKED) + ".weight", unpack(array, scale).astype(ml_dtypes.bfloat16)
        if name.endswith("A_log"):
            array = array[:heads].reshape(1, 1, heads, 1)
        tensors[short] = to_torch(array).contiguous()
    text = json.loads((source / "config.json").read_text())["text_config"]
    kept = {key: value for key, value in text.items() if key not in ("quantization_config", "dtype")}
    kept |= {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"]}
    (target / "config.json").write_text(json.dumps(kept))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


class Cache:
    """The package's cache with the mask [B, T] of everything that will be fed."""

    def __init__(self, model: Any, mask: np.ndarray | None) -> None:
        from transformers import DynamicCache

        self.inner, self.mask, self.fed = DynamicCache(config=model.config), mask, 0


class Transformers(TreePort):
    """Opened by ``from_pretrained``, attention in eager mode."""

    name, library = "transformers", Torch()
    code = cached_property(lambda self: importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear"))

    def capabilities(self) -> Capabilities:
        runs = ("prefill", "decode", "padded")
        taps, functions = frozenset(DELTA | LATENT | EXPERTS | TOP), frozenset(FUNCTIONS)
        return Capabilities(("float32", "bfloat16"), runs, TEXT_KINDS, functions, taps)

    def versions(self) -> dict[str, str]:
        return self.library.versions() | {"transformers": version("transformers")}

    def load(self, folder: Path, config: K3Config, dtype: str) -> Any:
        import torch

        if foreign := foreign_settings(config.text_config):
            raise Unsupported(f"transformers' Kimi-Linear has no {', '.join(foreign)}")
        with tempfile.TemporaryDirectory() as scratch:
            write_as_kimi_linear(folder, Path(scratch))
            model = self.code.KimiLinearForCausalLM.from_pretrained(
                scratch, dtype=getattr(torch, dtype), attn_implementation="eager"
            )
        return model.eval()

    def call(self, function: str, arrays, settings) -> tuple[np.ndarray, ...]:
        given = {name: None if value is None else self.library.to_array(value) for name, value in arrays.items()}
        with self.library.computing():
            results = FUNCTIONS[function](**given, **settings)
        return tuple(self.library.to_numpy(result) for result in results)

    def layers(self, model: Any) -> Any:
        return model.model.layers

    def embed_tokens(self, model: Any) -> Any:
        return model.model.embed_tokens

    def lm_head(self, model: Any) -> Any:
        return model.lm_head

    def attend(self, model: Any, layer: int, x: Any) -> None:
        self.attention(model, layer)(
            hidden_states=x, attention_mask=self.mask(model, layer, x), cache=self.fresh(model)
        )

    def run_layer(self, model: Any, layer: int, prefix_sum: Any, blocks: list[Any]) -> None:
        mask = self.mask(model, layer, prefix_sum)
        self.layers(model)[layer](prefix_sum, attention_mask=mask, cache=self.fresh(model))

    def fresh(self, model: Any) -> Any:
        return self.new_cache(model, None).inner

    def mask(self, model: Any, layer: int, x: Any) -> Any:
        """What the package gives a layer where nothing is padded: a causal mask, or none."""
        if model.config.layer_types[layer] == "linear_attention":
            return None
        given = {"inputs_embeds": x, "attention_mask": None, "cache": self.fresh(model), "position_ids": None}
        return self.code.create_causal_mask(config=model.config, **given)

    def new_cache(self, model: Any, mask: np.ndarray | None) -> Cache:
        return Cache(model, mask)

    def feed(self, model: Any, input_ids: Any, inputs_embeds: Any, cache: Cache | None) -> None:
        cache = cache or self.new_cache(model, None)
        cache.fed += (input_ids if inputs_embeds is None else inputs_embeds).shape[1]
        mask = None if cache.mask is None else self.library.to_array(cache.mask[:, : cache.fed].astype(np.int64))
        given = {"attention_mask": mask, "cache": cache.inner, "use_cache": True}
        model(input_ids=input_ids, inputs_embeds=inputs_embeds, **given)

    def watch(self, model: Any, text: Any, watch: Watch) -> None:
        watch.result(model.model.embed_tokens, f"{TEXT_MODEL}embed_tokens.output")
        watch.result(model.model.norm, f"{TEXT_MODEL}norm.output")
        watch.result(model.lm_head, "logits")
        for number, layer in enumerate(self.layers(model)):
            at = f"{TEXT_MODEL}layers.{number}."
            for module in (layer, layer.self_attn, layer.mlp):
                watch.inside(module, at)
            watch.result(layer.input_layernorm, f"{at}self_attn.input")
            watch.result(layer.post_attention_layernorm, f"{at}mlp.input")
            watch.result(layer.self_attn, f"{at}self_attn.output", first)
            watch.result(layer.mlp, f"{at}mlp.output")
            watch.result(layer, f"{at}output")
            if model.config.layer_types[number] == "full_attention":
                watch_latent(watch, f"{at}self_attn.", layer.self_attn)
            if hasattr(layer.mlp, "gate"):
                watch_router(watch, at, layer.mlp)
        for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
            watch.function(self.code, name, lambda *call: seen_recurrence(watch, *call))


def first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def watch_latent(watch: Watch, at: str, attention: Any) -> None:
    heads, width = attention.num_heads, attention.qk_head_dim
    query = attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj
    watch.result(query, f"{at}query", lambda q: q.unflatten(-1, (heads, width)))
    watch.result(attention.kv_a_layernorm, f"{at}latent")
    watch.result(attention.kv_a_proj_with_mqa, f"{at}key_rope", lambda both: both[..., attention.kv_lora_rank :])
    watch.given(attention.o_proj, f"{at}attention", lambda o: o.unflatten(-1, (heads, -1)))


def watch_router(watch: Watch, at: str, mlp: Any) -> None:
    """The choice, sorted; an imposed one is made to win by the correction bias, which never enters a weight."""

    def route(call: Any, arguments: tuple, keywords: dict) -> Any:
        imposed, own = watch.imposed.get(f"{at}router.indices"), mlp.gate.e_score_correction_bias
        if imposed is not None:
            wanted = own.new_zeros(imposed.shape[0], own.shape[0]).scatter(1, imposed, SURE)
            mlp.gate.e_score_correction_bias = own + wanted
        try:
            result = call(*arguments, **keywords)
        finally:
            mlp.gate.e_score_correction_bias = own
        indices, order = result[2].sort(dim=-1)
        watch.keep(f"{at}router.indices", indices)
        watch.keep(f"{at}router.weights", result[1].gather(-1, order))
        return result

    watch.instead(mlp.gate, route)
    watch.result(mlp.experts, f"{at}moe.routed")


def seen_recurrence(watch: Watch, call: Any, given: tuple, more: dict) -> Any:
    """q, k and v come in after their convolutions; the package normalizes them inside.

    Where fla-core is installed the package calls its kernels, which need a GPU; without one, its own PyTorch function.
    """
    import torch

    own = call if torch.cuda.is_available() else inspect.unwrap(call)
    result, at = own(*given, **more), f"{watch.layer}self_attn."
    for name, value in zip("qkv", given, strict=False):
        watch.keep(at + name, value)
    watch.keep(f"{at}log_decay", more["g"])
    watch.keep(f"{at}beta", more["beta"])
    watch.keep(f"{at}core", result[0])
    watch.keep(f"{at}state", result[1])
    return result


PORT = Transformers()
