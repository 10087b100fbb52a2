"""The tiers as data: names, sizes, what is quantized and what never is (K3.md §2, §15)."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from fixtures.catalogue import CATALOGUE, Entry
from port.tiers import (
    LINEARS,
    NEVER_QUANTIZED,
    ROUTER,
    TIERS,
    Output,
    outputs,
    quantized_modules,
    tier_named,
)
from reference.checkpoint import tensor_specs
from reference.config import K3Config
from reference.errors import InputError

K3 = K3Config.from_file(Path(__file__).parents[2] / "fixtures" / "presets" / "k3.json")
QUANTIZABLE = CATALOGUE["quantizable"]


def written(entry: Entry, tier: str, bits: int | None = None, plan=None) -> list[Output]:
    return list(outputs(entry.parsed, entry.expert_format, tier_named(tier, bits), plan))


def tensors(outputs: list[Output]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {tensor.name: (tensor.dtype, tensor.shape) for output in outputs for tensor in output.tensors}


@pytest.mark.parametrize(
    ("tier", "bits", "size"),
    [
        ("mxfp4", None, 1_560_860_324_864),
        ("3bit", None, 1_224_352_128_000),
        ("mixed2", None, 965_260_768_256),
        ("2bit", None, 884_009_524_224),
        ("mxfp4", 8, 1_507_677_707_264),
        ("mixed2", 8, 912_078_150_656),
    ],
)
def test_sizes_at_full_k3(tier: str, bits: int | None, size: int):
    assert sum(output.nbytes for output in outputs(K3, "mxfp4", tier_named(tier, bits))) == size


def test_known_sizes_of_a_pruned_k3():
    """242 and 179 of 896 experts with 8-bit non-experts: 451 and 350 GB (§15)."""
    for kept, gigabytes in ((242, 451), (179, 350)):
        plan = {layer: range(kept) for layer in range(1, 93)}
        size = sum(output.nbytes for output in outputs(K3, "mxfp4", tier_named("mxfp4", 8), plan))
        assert round(size / 1e9) == pytest.approx(gigabytes, abs=1.01)


def test_bits_per_expert_weight():
    for tier, bits in {"mxfp4": 4.25, "3bit": 3.5, "mixed2": 2.5, "2bit": 2.5}.items():
        experts = [output for output in written(QUANTIZABLE, tier) if "{expert}" in output.source]
        weights = sum(len(output.experts) * output.shape[0] * output.shape[1] for output in experts)
        assert 8 * sum(output.nbytes for output in experts) / weights == bits


def test_every_two_tiers_differ_in_dtypes_and_size():
    kinds = [(tier, bits) for tier in TIERS for bits in (None, 8) if bits is None or TIERS[tier].linears is None]
    for one, other in combinations(kinds, 2):
        first, second = (written(QUANTIZABLE, *kind) for kind in (one, other))
        assert tensors(first) != tensors(second)
        assert sum(output.nbytes for output in first) != sum(output.nbytes for output in second)


@pytest.mark.parametrize("name", CATALOGUE)
def test_what_may_be_quantized_and_what_never_is_cover_everything(name: str):
    entry = CATALOGUE[name]
    for spec in tensor_specs(entry.parsed, entry.expert_format):
        if ".experts." not in spec.name:
            may = bool(LINEARS.fullmatch(spec.name) or ROUTER.fullmatch(spec.name))
            assert may != bool(NEVER_QUANTIZED.fullmatch(spec.name)), spec.name
            assert not may or len(spec.shape) == 2 and spec.dtype == "BF16"


def test_the_exact_list_of_tensors_that_change_dtype():
    """By name, in one KDA layer and one MLA layer: a pattern that matches too much or too little shows here."""
    changed = {output.source for output in written(QUANTIZABLE, "2bit") if output.kind != "copy"}
    layers = "language_model.model.layers."
    moe = {
        f"block_sparse_moe.{name}"
        for name in (
            "gate.weight", "routed_expert_down_proj.weight", "routed_expert_up_proj.weight",
            "shared_experts.gate_proj.weight", "shared_experts.up_proj.weight", "shared_experts.down_proj.weight",
            "experts.{expert}.w1", "experts.{expert}.w2", "experts.{expert}.w3",
        )
    }  # fmt: skip
    # f_b_proj and q_b_proj have inputs of 64 each, so all widths of this entry are whole groups.
    kda = {f"self_attn.{part}_proj.weight" for part in ("q", "k", "v", "g", "f_a", "f_b", "b", "o")}
    mla = {f"self_attn.{part}_proj.weight" for part in ("q_a", "q_b", "g", "o")}
    mla |= {"self_attn.kv_a_proj_with_mqa.weight"}
    found = {
        layer: {name.removeprefix(f"{layers}{layer}.") for name in changed if f".{layer}." in name} for layer in (1, 2)
    }
    assert found[1] == kda | moe
    assert found[2] == mla | moe
    assert {name for name in changed if ".layers." not in name} == {
        "language_model.lm_head.weight",
        "language_model.model.embed_tokens.weight",
    }


def test_kv_b_is_taken_apart_where_both_parts_are_whole_groups():
    entry = Entry("wide", {**QUANTIZABLE.config, "text_config": {**QUANTIZABLE.config["text_config"]}})
    entry.config["text_config"] |= {"qk_nope_head_dim": 64}
    part = next(output for output in written(entry, "2bit") if output.kind == "quantize_kv_b")
    heads, rank, value = 4, 64, 32
    shapes = [tensor.shape for tensor in part.tensors if tensor.name.endswith(".weight")]
    assert shapes == [(heads, rank, 64 * 4 // 32), (heads, value, rank * 4 // 32)]
    assert [path.rsplit(".", 1)[1] for path in part.quantized] == ["embed_q", "unembed_out"]
    narrow = tensors(written(QUANTIZABLE, "2bit"))
    assert narrow["language_model.model.layers.2.self_attn.kv_b_proj.weight"][0] == "BF16"


def test_a_linear_map_whose_width_is_no_whole_group_stays_bf16():
    names = tensors(written(CATALOGUE["mini"], "mxfp4", 8))
    assert names["language_model.lm_head.weight"] == ("BF16", (320, 80))
    assert names["language_model.model.layers.1.block_sparse_moe.routed_expert_up_proj.scales"] == ("BF16", (80, 1))


@pytest.mark.parametrize(("name", "tier"), [("mini", "3bit"), ("mini", "2bit"), ("dense-experts", "mixed2")])
def test_experts_whose_width_is_no_whole_group_are_refused(name: str, tier: str):
    with pytest.raises(InputError, match=r"text_config\.\w+: expected a multiple of 64, .* found \d+; "):
        written(CATALOGUE[name], tier)


def test_dense_experts_are_no_mxfp4():
    with pytest.raises(InputError, match="MXFP4 experts, whose bytes tier mxfp4 copies, found dense"):
        written(CATALOGUE["dense-experts"], "mxfp4")


@pytest.mark.parametrize(("tier", "bits"), [("4bit", None), ("mxfp4", 4), ("2bit", 8), ("3bit", 8)])
def test_unknown_tiers_are_refused(tier: str, bits: int | None):
    with pytest.raises(InputError, match="expected .*; "):
        tier_named(tier, bits)


def test_the_quantization_block_names_loaders_modules():
    entry = CATALOGUE["quantizable"]
    modules = quantized_modules(entry.parsed, written(entry, "2bit"))
    layer = "language_model.model.layers."
    assert modules[f"{layer}1.self_attn.qkv_proj"].bits == 4
    assert f"{layer}1.self_attn.q_proj" not in modules
    assert modules[f"{layer}1.mlp.gate"].bits == 8
    assert modules[f"{layer}1.mlp.switch_mlp.down_proj"].bits == 2
    assert not any("block_sparse_moe" in path or "res_proj" in path for path in modules)


def test_without_a_low_rank_query_mla_keeps_its_q_proj_under_its_own_name():
    text = QUANTIZABLE.config["text_config"] | {"q_lora_rank": None}
    entry = Entry("direct", QUANTIZABLE.config | {"text_config": text})
    modules = quantized_modules(entry.parsed, written(entry, "2bit"))
    assert "language_model.model.layers.2.self_attn.q_proj" in modules
    assert "language_model.model.layers.2.self_attn.qkv_proj" not in modules
