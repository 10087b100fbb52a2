"""A mini-K3 of gigabytes for benchmarks: real tensor sizes, few layers, numbers that only look like weights."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from fixtures.base import layers, merged
from fixtures.build import split
from fixtures.catalogue import config
from reference.checkpoint import TensorSpec, tensor_specs
from reference.config import K3Config

TEXT = {
    "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8,
    "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 512,
    "routed_expert_hidden_size": 512, "attn_res_block_size": 12,
}  # fmt: skip
LINEAR = {"num_heads": 8, "head_dim": 128}
SHARD_BYTES = 1 << 30
NUMBERS = 1 << 22
"""Numbers that are drawn once; every tensor is a piece of them from a place of its own."""


def document(layer_count: int) -> dict:
    """``config.json``: hidden 1024, latent 512, 256 experts, every fourth layer MLA; about 0.11 GB a layer."""
    kinds = "".join("kkkm"[layer % 4] for layer in range(layer_count))
    result = config(TEXT, LINEAR, kinds)
    return merged(result, {"text_config": {**layers(kinds)}}) | {"model_type": "kimi_k3"}


class Pool:
    """Bytes for tensors of each kind."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        normal = draw.standard_normal(NUMBERS).astype(np.float32)
        self.codes = draw.integers(0, 256, NUMBERS, np.uint8)
        self.scales = draw.integers(118, 124, NUMBERS).astype(np.uint8)
        self.bf16 = (0.02 * normal).astype(ml_dtypes.bfloat16).view(np.uint8)
        self.f32 = (0.02 * normal).view(np.uint8)

    def write(self, file, spec: TensorSpec, number: int) -> None:
        kinds = {"BF16": self.bf16, "F32": self.f32}
        data = kinds.get(spec.dtype, self.scales if spec.name.endswith("weight_scale") else self.codes)
        start = 4 * (number * 7919 % (len(data) // 8))
        left = spec.nbytes
        while left:
            piece = data[start : start + left]
            file.write(piece)
            left, start = left - len(piece), 0


def write_source(folder: Path, layer_count: int) -> int:
    """Write the checkpoint into a new folder, one shard after the other; returns the bytes of its tensors."""
    folder.mkdir(parents=True)
    settings = document(layer_count)
    specs = list(tensor_specs(K3Config.from_dict(settings)))
    shards, weight_map, pool, number = split(specs, SHARD_BYTES), {}, Pool(), 0
    for place, shard in enumerate(shards, 1):
        name, header, position = f"model-{place:05}-of-{len(shards):05}.safetensors", {}, 0
        for spec in shard:
            end = position + spec.nbytes
            header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [position, end]}
            weight_map[spec.name], position = name, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for spec in shard:
                pool.write(file, spec, number)
                number += 1
    total = sum(spec.nbytes for spec in specs)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(settings))
    return total
