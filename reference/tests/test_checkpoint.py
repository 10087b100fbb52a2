from __future__ import annotations

import json
from pathlib import Path

import pytest

from reference.checkpoint import expert_format_of, tensor_rows, tensor_specs
from reference.config import K3Config
from reference.errors import InputError

ROOT = Path(__file__).parents[2]
MINI = K3Config.from_file(ROOT / "fixtures/golden/mini")
K3 = K3Config.from_file(ROOT / "fixtures/presets/k3.json")
LAYER = "language_model.model.layers."


def specs(config: K3Config, expert_format="mxfp4") -> dict[str, tuple[tuple[int, ...], str]]:
    return {spec.name: (spec.shape, spec.dtype) for spec in tensor_specs(config, expert_format)}


def with_text(config: K3Config, linear: dict | None = None, **text) -> K3Config:
    changed = config.text_config.model_copy(update=text)
    changed = changed.model_copy(
        update={"linear_attn_config": changed.linear_attn_config.model_copy(update=linear or {})}
    )
    return config.model_copy(update={"text_config": changed})


def test_the_golden_checkpoint_has_exactly_these_tensors():
    """Names, shapes and dtypes of a checkpoint that this project did not write."""
    index = json.loads((ROOT / "fixtures/golden/mini/model.safetensors.index.json").read_text())
    expected = specs(MINI)
    assert set(index["weight_map"]) == set(expected)
    stored = {}
    for shard in set(index["weight_map"].values()):
        raw = (ROOT / "fixtures/golden/mini" / shard).read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        header.pop("__metadata__", None)
        stored |= {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in header.items()}
    assert stored == expected
    assert index["metadata"]["total_size"] == sum(spec.nbytes for spec in tensor_specs(MINI))


@pytest.mark.parametrize(
    "name, shape, dtype",
    [
        ("0.self_attn.A_log", (128,), "F32"),
        ("0.self_attn.k_conv1d.weight", (12288, 1, 4), "F32"),
        ("0.self_attn.f_b_proj.weight", (12288, 128), "BF16"),
        ("0.mlp.down_proj.weight", (7168, 33792), "BF16"),
        ("3.self_attn.kv_a_proj_with_mqa.weight", (576, 7168), "BF16"),
        ("3.self_attn.q_b_proj.weight", (18432, 1536), "BF16"),
        ("92.self_attn.kv_b_proj.weight", (24576, 512), "BF16"),
        ("92.block_sparse_moe.gate.e_score_correction_bias", (896,), "F32"),
        ("92.block_sparse_moe.shared_experts.up_proj.weight", (6144, 7168), "BF16"),
        ("92.block_sparse_moe.experts.895.w2.weight_packed", (3584, 1536), "U8"),
        ("92.block_sparse_moe.experts.895.w3.weight_scale", (3072, 112), "U8"),
    ],
)
def test_released_shapes(name, shape, dtype):
    assert specs(K3)[LAYER + name] == (shape, dtype)


def test_settings_change_the_tensors():
    base = set(specs(MINI))
    gone = lambda config: {name.removeprefix(LAYER) for name in base - set(specs(config))}  # noqa: E731
    new = lambda config: {name.removeprefix(LAYER) for name in set(specs(config)) - base}  # noqa: E731
    low_rank = with_text(MINI, {"use_full_rank_gate": None})
    assert "0.self_attn.g_proj.weight" in gone(low_rank) and "0.self_attn.g_a_proj.weight" in new(low_rank)
    direct = with_text(MINI, q_lora_rank=None)
    assert "3.self_attn.q_a_layernorm.weight" in gone(direct) and "3.self_attn.q_proj.weight" in new(direct)
    assert not new(with_text(MINI, latent_moe_use_norm=None))
    assert {name.split(".", 1)[1] for name in gone(with_text(MINI, latent_moe_use_norm=None))} == {
        "block_sparse_moe.routed_expert_norm.weight"
    }
    plain = {name.rpartition("_")[2] for name in gone(with_text(MINI, attn_res_block_size=None))}
    assert plain == {"norm.weight", "proj.weight"}
    assert "0.block_sparse_moe.gate.weight" in new(with_text(MINI, first_k_dense_replace=0))


def test_the_norm_stands_only_behind_a_latent():
    names = specs(with_text(MINI, routed_expert_hidden_size=None), "dense")
    assert not any("routed_expert" in name for name in names)
    assert names[LAYER + "1.block_sparse_moe.experts.0.w1.weight"] == ((32, 64), "BF16")


def test_more_heads_than_channels_keep_every_value():
    assert specs(with_text(MINI, {"num_heads": 40}))[LAYER + "0.self_attn.A_log"] == ((40,), "F32")


def test_expert_format_is_told_from_the_names():
    for expert_format in ("mxfp4", "dense"):
        assert expert_format_of(specs(MINI, expert_format)) == expert_format


def test_rows_and_specs_agree():
    counted = sum(len(prefixes) * len(rows) for prefixes, rows in tensor_rows(MINI, "mxfp4"))
    assert counted == len(specs(MINI)) == 420


@pytest.mark.parametrize("field", ["routed_expert_hidden_size", "moe_intermediate_size"])
def test_widths_that_mxfp4_cannot_hold_are_refused(field):
    odd = with_text(MINI, **{field: 33})
    with pytest.raises(InputError, match=field):
        list(tensor_specs(odd))
    assert specs(odd, "dense")
