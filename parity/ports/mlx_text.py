"""The text tower that mlx-lm and mlx-vlm have in common: the same module names, each its own code.

An adapter gives the modules of its package as ``language`` (the model's file), ``delta`` (its gated delta rule) and
``caches``; what is seen is the package's own computation.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fixtures.base import QUANTIZATION
from parity.ports.adapter import TreePort, padding_of
from parity.ports.mlx import Mlx
from parity.ports.watch import Watch
from parity.protocol import TEXT_KINDS, Capabilities, Unsupported
from parity.quantities import TEXT_MODEL
from reference.errors import InputError

DELTA = {"self_attn." + name for name in ("q", "k", "v", "log_decay", "beta", "core", "state", "output", "input")}
LATENT = {"self_attn." + name for name in ("query", "latent", "key_rope", "attention")}
EXPERTS = {"router.indices", "router.weights", "mlp.input", "mlp.output", "output"}
TOP = {f"{TEXT_MODEL}embed_tokens.output", f"{TEXT_MODEL}norm.output", "logits"}
SHOWN = frozenset(DELTA | LATENT | EXPERTS | TOP)
LATENT_MOE = frozenset({"moe.latent", "moe.routed"})
SURE = 1e4
"""More than any biased router score: an expert with this on top of its bias is chosen."""


@contextmanager
def as_released(folder: Path) -> Iterator[Path]:
    """The checkpoint, whose config says how its experts are packed: the release's does, the golden cases' does not, and
    both packages go by it. Where it is missing a folder of links beside a completed config stands in."""
    config = json.loads((folder / "config.json").read_text())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    packed = any(name.endswith(".weight_packed") for name in index["weight_map"])
    if not packed or "quantization_config" in config["text_config"]:
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        for path in folder.iterdir():
            (Path(scratch) / path.name).symlink_to(path.resolve())
        config["text_config"]["quantization_config"] = QUANTIZATION
        (Path(scratch) / "config.json").unlink()
        (Path(scratch) / "config.json").write_text(json.dumps(config))
        yield Path(scratch)


def set_dtype(model: Any, dtype: str) -> Any:
    """The loaded model, in float32 where that is asked for; a bfloat16 model is what a loader gives."""
    import mlx.core as mx

    if dtype == "float32":
        model.set_dtype(mx.float32)
    return model


class CpuMlx(Mlx):
    """On a CPU MLX gathers expert weights in float32 only: bfloat16 experts that are not packed cannot run there."""

    @contextmanager
    def computing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "only supports float32" in str(error):
                raise Unsupported(f"MLX on this device: {error}") from None
            raise


class MlxText(TreePort):
    """Probes and calls for the text tower; ``select`` is the name of the package's router function."""

    library = CpuMlx()
    select: str
    language: Any
    delta: Any
    caches: Any

    def capabilities(self) -> Capabilities:
        runs = ("prefill", "decode", "padded")
        return Capabilities(("float32", "bfloat16"), runs, TEXT_KINDS, taps=SHOWN | LATENT_MOE)

    def shown(self, text: Any) -> frozenset[str]:
        """Without a latent the sum of the experts is no module's input or output, so that it cannot be seen."""
        return SHOWN | LATENT_MOE if text.routed_expert_hidden_size else SHOWN

    def attend(self, model: Any, layer: int, x: Any) -> None:
        module = self.layers(model)[layer]
        causal = None if module.is_linear else self.language.create_attention_mask(x, None, return_array=True)
        module.self_attn(x, causal, None)

    def run_layer(self, model: Any, layer: int, prefix_sum: Any, blocks: list[Any]) -> None:
        self.layers(model)[layer](prefix_sum, blocks=self.bank(model, blocks))

    def layer_result(self, model: Any, prefix_sum: Any, blocks: list[Any]) -> Any:
        return prefix_sum, self.bank(model, blocks)

    def bank(self, model: Any, blocks: list[Any]) -> Any:
        """The package's own list of block vectors; None without attention residuals."""
        args = model.language_model.args
        if args.attn_res_block_size is None:
            return None
        bank = self.language.ResidualBlocks(args.rms_norm_eps)
        for block in blocks:
            bank.append(block)
        return bank

    def new_cache(self, model: Any, mask: np.ndarray | None) -> Any:
        """Padding is told to the caches, as the package's own batched generation does."""
        cache = model.make_cache()
        if mask is None:
            return cache
        left, right = padding_of(mask)
        if any(left) and any(right):
            raise Unsupported(f"{self.name} pads a batch on one side")
        for number, entry in enumerate(cache):
            if isinstance(entry, self.caches.KVCache):
                cache[number] = entry = self.caches.BatchKVCache(left)
            elif any(left):
                entry.left_padding = self.library.to_array(np.array(left))
            if any(right):
                entry.prepare(lengths=mask.sum(axis=1).tolist(), right_padding=right)
        return cache

    def watch(self, model: Any, text: Any, watch: Watch) -> None:
        tower = model.language_model.model
        watch.result(tower.embed_tokens, f"{TEXT_MODEL}embed_tokens.output")
        watch.result(tower.norm, f"{TEXT_MODEL}norm.output")
        watch.result(model.language_model.lm_head, "logits")
        for number, layer in enumerate(tower.layers):
            at = f"{TEXT_MODEL}layers.{number}."
            watch.inside(layer, at)
            watch.inside(layer.self_attn, at)
            watch.inside(layer.mlp, at)
            watch.result(layer.input_layernorm, f"{at}self_attn.input")
            watch.result(layer.self_attn, f"{at}self_attn.output")
            watch.result(layer.post_attention_layernorm, f"{at}mlp.input")
            watch.result(layer.mlp, f"{at}mlp.output")
            watch.result(layer, f"{at}output", lambda result: result[0])
            (watch_delta if layer.is_linear else watch_latent)(watch, f"{at}self_attn.", layer.self_attn)
            if hasattr(layer.mlp, "routed_expert_up_proj"):
                watch_experts(watch, at, layer.mlp)
        for name in ("gated_delta_ops", "gated_delta_kernel"):
            watch.function(self.delta, name, lambda *call: seen_recurrence(watch, *call))
        watch.function(self.language, "scaled_dot_product_attention", lambda *call: seen_attention(watch, *call))
        watch.function(self.language, self.select, lambda *call: seen_choice(watch, *call))


def watch_delta(watch: Watch, at: str, attention: Any) -> None:
    """q, k and v come out of one convolution, in this order."""
    for number, name in enumerate("qkv"):

        def part(result, number=number):
            three = result[0].reshape(*result[0].shape[:2], 3, attention.num_heads, attention.head_dim)
            return three[:, :, number]

        watch.result(attention.qkv_conv, at + name, part)


def watch_latent(watch: Watch, at: str, attention: Any) -> None:
    """Attention before the gate: what the softmax gave or, in the absorbed form, what ``unembed_out`` made of it."""
    heads, width = attention.num_heads, attention.q_head_dim
    query = attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj
    watch.result(query, f"{at}query", lambda q: q.reshape(*q.shape[:2], heads, width))
    watch.result(attention.kv_a_layernorm, f"{at}latent")
    watch.result(attention.kv_a_proj_with_mqa, f"{at}key_rope", lambda both: both[..., attention.kv_lora_rank :])
    watch.result(attention.unembed_out, f"{at}attention", lambda o: o.transpose(0, 2, 1, 3))


def watch_experts(watch: Watch, at: str, mlp: Any) -> None:
    """The sum of the experts is what the norm is given or, without a norm, what goes up."""
    flat = lambda x: x.reshape(-1, x.shape[-1])  # noqa: E731
    watch.result(mlp.routed_expert_down_proj, f"{at}moe.latent", flat)
    watch.given(mlp.routed_expert_norm or mlp.routed_expert_up_proj, f"{at}moe.routed", flat)


def seen_recurrence(watch: Watch, call: Any, given: tuple, more: dict) -> Any:
    """The package computes with exp(log-decay), whose logarithm is gone where it is 0; states are [B, H, D_v, D_k]."""
    import mlx.core as mx

    result, at = call(*given, **more), f"{watch.layer}self_attn."
    if (given[3] == 0).any():
        watch.unseen.add("self_attn.log_decay")
    watch.keep(f"{at}log_decay", mx.log(given[3]))
    watch.keep(f"{at}beta", given[4])
    watch.keep(f"{at}core", result[0])
    watch.keep(f"{at}state", result[1].swapaxes(-1, -2))
    return result


def seen_attention(watch: Watch, call: Any, given: tuple, more: dict) -> Any:
    result = call(*given, **more)
    watch.keep(f"{watch.layer}self_attn.attention", result.transpose(0, 2, 1, 3))
    return result


def seen_choice(watch: Watch, call: Any, given: tuple, more: dict) -> Any:
    """The router's choice, sorted; an imposed one is made to win by its bias, which never enters a weight."""
    import mlx.core as mx

    logits, bias, *others = given
    imposed = watch.imposed.get(f"{watch.layer}router.indices")
    if imposed is not None:
        if imposed.shape[-1] != others[0]:
            raise InputError(
                "imposed", "router.indices", f"{others[0]} experts a token", imposed.shape, "impose others"
            )
        wanted = (imposed[..., None] == mx.arange(logits.shape[-1])).any(axis=-2).reshape(logits.shape)
        bias = bias + SURE * wanted
    indices, weights = call(logits, bias, *others, **more)
    order = mx.argsort(indices, axis=-1)
    for name, value in (("indices", indices), ("weights", weights)):
        value = mx.take_along_axis(value, order, axis=-1)
        watch.keep(f"{watch.layer}router.{name}", value.reshape(-1, value.shape[-1]))
    return indices, weights
