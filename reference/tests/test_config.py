from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from reference.config import K3Config, LinearAttnConfig, TextConfig, VisionConfig, read_json
from reference.errors import InputError

ROOT = Path(__file__).parents[2]
MINI = json.loads((ROOT / "fixtures/golden/mini/config.json").read_text())
K3 = ROOT / "fixtures/presets/k3.json"
OFF_WHEN_ABSENT = {
    TextConfig: {
        "activation_situ_beta", "activation_situ_linear_beta", "attn_res_block_size", "q_lora_rank",
        "mla_use_output_gate", "num_shared_experts",
        "routed_expert_hidden_size", "latent_moe_use_norm", "num_expert_group", "topk_group",
    },
    LinearAttnConfig: {"gate_lower_bound", "use_full_rank_gate"},
    VisionConfig: {"activation_func", "projector_hidden_act", "mlp_type", "pos_emb_type"},
    K3Config: set(),
}  # fmt: skip


def changed(path: str, *value) -> dict:
    """The mini configuration with the field at ``path`` set, or, without a value, gone."""
    data = copy.deepcopy(MINI)
    *parents, field = path.split(".")
    section = data
    for parent in parents:
        section = section[parent]
    section[field] = value[0] if value else section.pop(field)
    if not value:
        del section[field]
    return data


def refused(data: dict, *words: str) -> None:
    with pytest.raises(InputError) as error:
        K3Config.from_dict(data, "some/config.json")
    message = str(error.value)
    assert "\n" not in message
    for word in ("some/config.json", *words):
        assert word in message


def required_fields():
    sections = {
        "": K3Config,
        "text_config.": TextConfig,
        "text_config.linear_attn_config.": LinearAttnConfig,
        "vision_config.": VisionConfig,
    }
    for prefix, section in sections.items():
        for field in section.model_fields:
            if field not in OFF_WHEN_ABSENT[section]:
                yield prefix + field


def test_the_released_configuration():
    text = K3Config.from_file(K3).text_config
    kda = [layer for layer in range(93) if text.is_kda(layer)]
    assert len(kda) == 69 and 3 not in kda and 91 not in kda and 92 not in kda
    assert [layer for layer in range(93) if not text.is_moe(layer)] == [0]
    assert text.linear_attn_config.a_log_length == 128 and text.linear_attn_config.num_heads == 96
    assert text.latent_size == 3584 and text.shared_width == 6144 and text.query_head_dim == 192
    assert K3Config.from_file(K3).vision_config.head_dim == 128


@pytest.mark.parametrize("field", list(required_fields()))
def test_a_missing_or_null_field_is_an_error_that_names_it(field: str):
    refused(changed(field), field)
    refused(changed(field, None), field)


@pytest.mark.parametrize("section", OFF_WHEN_ABSENT)
def test_the_fields_that_may_be_absent_are_those_of_the_specification(section):
    assert {name for name, field in section.model_fields.items() if not field.is_required()} == OFF_WHEN_ABSENT[section]


@pytest.mark.parametrize(
    "field, value",
    [
        ("text_config.hidden_size", "64"),
        ("text_config.hidden_size", 64.0),
        ("text_config.hidden_size", True),
        ("text_config.hidden_size", 0),
        ("text_config.rms_norm_eps", -1e-5),
        ("text_config.moe_renormalize", 1),
        ("text_config.hidden_act", "gelu"),
        ("text_config.moe_router_activation_func", "relu"),
        ("text_config.mla_use_nope", False),
        ("text_config.tie_word_embeddings", True),
        ("text_config.linear_attn_config.gate_lower_bound", 5.0),
        ("text_config.linear_attn_config.gate_lower_bound", 0.0),
        ("text_config.linear_attn_config", []),
        ("vision_config.norm_type", "layernorm"),
        ("vision_config.attn_bias", True),
        ("vision_config.merge_kernel_size", [2]),
    ],
)
def test_a_wrong_type_or_value_names_the_field(field, value):
    refused(changed(field, value), field)


@pytest.mark.parametrize(
    "field, value, word",
    [
        ("text_config.num_key_value_heads", 2, "num_key_value_heads"),
        ("text_config.activation_situ_beta", None, "activation_situ_beta"),
        ("text_config.num_experts_per_token", 9, "num_experts_per_token"),
        ("text_config.num_expert_group", 3, "num_expert_group"),
        ("text_config.topk_group", 2, "topk_group"),
        ("text_config.linear_attn_config.kda_layers", [1, 2, 3], "kda_layers"),
        ("text_config.linear_attn_config.full_attn_layers", [4, 6, 5], "full_attn_layers"),
        ("text_config.pad_token_id", 320, "pad_token_id"),
        ("media_placeholder_token_id", 320, "media_placeholder_token_id"),
        ("vision_config.text_hidden_size", 65, "text_hidden_size"),
        ("vision_config.qkv_hidden_size", 50, "qkv_hidden_size"),
    ],
)
def test_fields_that_contradict_each_other(field, value, word):
    refused(changed(field, value), word)


def test_layer_lists_that_count_from_zero_are_refused():
    data = changed("text_config.linear_attn_config.kda_layers", [0, 1, 2, 4])
    data["text_config"]["linear_attn_config"]["full_attn_layers"] = [3, 5]
    refused(data, "kda_layers", "1-based")


def test_a_misspelt_field_is_recognised():
    data = changed("text_config.num_experts_per_token")
    data["text_config"]["num_experts_per_tok"] = 3
    refused(data, "num_experts_per_token", "num_experts_per_tok'")


@pytest.mark.parametrize("content", ["", "{", "[1]", "\udcff", "[" * 100_000])
def test_a_file_that_is_no_configuration(tmp_path: Path, content: str):
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match="config.json"):
        K3Config.from_file(tmp_path)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(InputError, match="nothing there"):
        read_json(tmp_path / "config.json")


def test_dense_layers_and_experts_alternate():
    text = K3Config.from_dict(MINI).text_config.model_copy(update={"first_k_dense_replace": 2, "moe_layer_freq": 2})
    assert [text.is_moe(layer) for layer in range(6)] == [False, False, True, False, True, False]
