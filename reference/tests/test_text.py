import pytest
import torch

from reference.cache import new_cache
from reference.errors import InputError
from reference.taps import Recorder, recording
from reference.tests.models import mini_config, random_model, randn

IDS = torch.randint(0, 300, (3, 8), generator=torch.Generator().manual_seed(0))

NO_NORM = {"latent_moe_use_norm": False}  # a norm behind the experts hides the scale of their weights
SETTINGS = {
    "unbounded gate": ({"gate_lower_bound": None}, {}),
    "another bound": ({"gate_lower_bound": -2.0}, {}),
    "low-rank gate": ({"use_full_rank_gate": None}, {}),
    "kernel 1": ({"short_conv_kernel_size": 1}, {}),
    "kernel 6": ({"short_conv_kernel_size": 6}, {}),
    "other KDA heads": ({"num_heads": 6, "head_dim": 4}, {}),
    "only KDA": ({"kda_layers": [1, 2, 3, 4, 5, 6], "full_attn_layers": []}, {}),
    "only MLA": ({"kda_layers": [], "full_attn_layers": [1, 2, 3, 4, 5, 6]}, {}),
    "plain query": ({}, {"q_lora_rank": None}),
    "no output gate": ({}, {"mla_use_output_gate": None}),
    "other MLA widths": ({}, {"qk_nope_head_dim": 5, "qk_rope_head_dim": 3, "v_head_dim": 7}),
    "no latent": ({}, {"routed_expert_hidden_size": None}),
    "no latent norm": ({}, NO_NORM),
    "no attention residuals": ({}, {"attn_res_block_size": None}),
    "block size 1": ({}, {"attn_res_block_size": 1}),
    "block size 100": ({}, {"attn_res_block_size": 100}),
    "expert groups": ({}, {"num_expert_group": 4, "topk_group": 2}),
    "softmax router": ({}, {"moe_router_activation_func": "softmax"}),
    "not renormalized": ({}, {"moe_renormalize": False, **NO_NORM}),
    "scaled routing": ({}, {"routed_scaling_factor": 2.5, **NO_NORM}),
    "one expert": ({}, {"num_experts_per_token": 1}),
    "no linear bound": ({}, {"activation_situ_linear_beta": None}),
    "another beta": ({}, {"activation_situ_beta": 1.0}),
    "silu": ({}, {"hidden_act": "silu"}),
    "no shared experts": ({}, {"num_shared_experts": None}),
    "three dense layers": ({}, {"first_k_dense_replace": 3}),
    "no dense layer": ({}, {"first_k_dense_replace": 0}),
    "every second layer MoE": ({}, {"moe_layer_freq": 2}),
    "another eps": ({}, {"rms_norm_eps": 0.1}),
}


BASE = random_model(mini_config())(IDS)
WITHOUT_NORM = random_model(mini_config(**NO_NORM))(IDS)


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_acts_and_decodes_like_one_pass(setting):
    linear, text = SETTINGS[setting]
    config = mini_config(linear, **text)
    model = random_model(config)
    whole = model(IDS)
    base = WITHOUT_NORM if NO_NORM.items() < text.items() else BASE
    assert whole.isfinite().all()
    assert not torch.allclose(whole, base, rtol=1e-3, atol=1e-3)
    cache = new_cache(config.text_config, 3, "float64")
    parts = [model(part, cache=cache) for part in IDS.split([4, 1, 2, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("sizes", [[n, 8 - n] for n in range(1, 8)] + [[1] * 8, [3, 3, 2]], ids=str)
def test_every_split_equals_one_pass(sizes):
    config = mini_config()
    model, cache = random_model(config), new_cache(config.text_config, 3, "float64")
    parts = [model(part, cache=cache) for part in IDS.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), BASE, atol=1e-8, rtol=1e-8)


MASKS = {
    "left": [[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1], [1] * 8],
    "right": [[1, 1, 0, 0, 0, 0, 0, 0], [1] * 8, [1, 0, 0, 0, 0, 0, 0, 0]],
    "any": [[0, 1, 0, 1, 1, 0, 0, 1], [0, 0, 1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 1, 1, 1]],
}


@pytest.mark.parametrize("sizes", [[8], [3, 5], [2, 2, 2, 2]], ids=str)
@pytest.mark.parametrize("side", MASKS)
def test_padded_rows_equal_rows_alone_and_padding_moves_no_bit(side, sizes):
    config, mask = mini_config(), torch.tensor(MASKS[side]).bool()
    model, x = random_model(config), randn(3, 8, 64, seed=1)
    results = []
    for filling in (torch.nan, 1e30):
        padded, cache = torch.where(mask[..., None], x, filling), new_cache(config.text_config, 3, "float64")
        pairs = zip(padded.split(sizes, dim=1), mask.split(sizes, dim=1), strict=True)
        logits = [model(inputs_embeds=part, attention_mask=part_mask, cache=cache) for part, part_mask in pairs]
        results.append(torch.cat(logits, dim=1)[mask])
    assert torch.equal(results[0], results[1])
    alone = [model(inputs_embeds=x[row : row + 1, mask[row]])[0] for row in range(3)]
    torch.testing.assert_close(results[0], torch.cat(alone), atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("layers, block_size, blocks", [(1, 12, 1), (6, 3, 2), (6, 2, 3), (6, 1, 6), (6, 4, 2)])
def test_the_stack_can_be_cut_at_every_layer(layers, block_size, blocks):
    kda = [layer for layer in (1, 2, 3, 5) if layer <= layers]
    full = [layer for layer in (4, 6) if layer <= layers]
    config = mini_config(
        {"kda_layers": kda, "full_attn_layers": full}, num_hidden_layers=layers, attn_res_block_size=block_size
    )
    tower = random_model(config).language_model.model
    x = tower.embed(IDS)
    whole, prefix_sum, handed_over = tower(x), x, []
    for layer in tower.layers:
        given = list(handed_over)
        prefix_sum, after = layer(prefix_sum, handed_over)
        assert all(left is right for left, right in zip(given, handed_over, strict=True))
        handed_over = [block.clone() for block in after]
    assert len(handed_over) == blocks
    assert torch.equal(tower.output(prefix_sum, handed_over), whole)


def test_a_layer_by_definition():
    tower = random_model(mini_config()).language_model.model
    p, blocks = randn(2, 4, 64), [randn(2, 4, 64, seed=1)]
    for layer in tower.layers[2:4]:
        attended = layer.self_attn(layer.attention_input(p, blocks))
        middle = attended if layer.layer == 3 else p + attended
        now = [*blocks, p] if layer.layer == 3 else blocks
        fed = layer.block_sparse_moe(layer.mlp_input(middle, now))
        prefix_sum, after = layer(p, blocks)
        torch.testing.assert_close(prefix_sum, middle + fed)
        assert len(after) == len(now) and torch.equal(after[-1], now[-1])


def test_without_attention_residuals_it_is_the_ordinary_pre_norm_residual():
    tower = random_model(mini_config(attn_res_block_size=None)).language_model.model
    x = randn(2, 4, 64)
    layer = tower.layers[0]
    middle = x + layer.self_attn(layer.input_layernorm(x))
    prefix_sum, blocks = layer(x, [])
    torch.testing.assert_close(prefix_sum, middle + layer.mlp(layer.post_attention_layernorm(middle)))
    assert blocks == []
    assert torch.equal(tower.output(x, []), tower.norm(x))


def test_last_mix_comes_before_the_last_norm():
    tower = random_model(mini_config()).language_model.model
    p, blocks = randn(2, 4, 64), [10 * randn(2, 4, 64, seed=1)]
    tower.output_attn_res_proj.weight.data.zero_()
    torch.testing.assert_close(tower.output(p, blocks), tower.norm((p + blocks[0]) / 2))


@pytest.mark.parametrize("bad", [-1, 320, 10**12])
def test_ids_outside_the_vocabulary_are_refused_before_anything_moves(bad):
    config = mini_config()
    model, cache = random_model(config), new_cache(config.text_config, 1, "float64")
    with pytest.raises(InputError, match=rf"input_ids: token id: expected ids in \[0, 320\), found {bad} at \[0, 1\]"):
        model(torch.tensor([[5, bad]]), cache=cache)
    assert cache.length == 0 and cache.layers[3].latent.shape[1] == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "found neither"),
        ({"input_ids": IDS, "inputs_embeds": randn(3, 8, 64)}, "found both"),
        ({"input_ids": IDS, "attention_mask": torch.ones(3, 9)}, "token_mask: shape"),
        ({"input_ids": IDS.double()}, "integers"),
        ({"input_ids": IDS[0]}, "integers"),
        ({"inputs_embeds": randn(3, 8, 64).float()}, "inputs_embeds: dtype"),
        ({"input_ids": IDS, "cache": new_cache(mini_config().text_config, 2, "float64")}, "cache: batch"),
        ({"input_ids": IDS, "cache": new_cache(mini_config().text_config, 3, "float32")}, "cache: batch and dtype"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(arguments, message):
    with pytest.raises(InputError, match=message) as caught:
        random_model(mini_config())(**arguments)
    assert "\n" not in str(caught.value)


def test_every_named_quantity_is_tapped():
    config = mini_config()
    with recording(Recorder()) as recorder:
        random_model(config)(IDS)
    kda = {f"self_attn.{what}" for what in ("q", "k", "v", "log_decay", "beta", "core", "state")}
    mla = {f"self_attn.{what}" for what in ("query", "latent", "key_rope", "attention")}
    moe = {"router.scores", "router.margin", "router.indices", "router.weights", "moe.latent", "moe.routed"}
    every = {"self_attn.input", "self_attn.output", "mlp.input", "mlp.output", "output"}
    expected = {"logits", "language_model.model.embed_tokens.output", "language_model.model.norm.output"}
    for layer in range(6):
        names = every | (kda if config.text_config.is_kda(layer) else mla) | (moe if layer else set())
        expected |= {f"language_model.model.layers.{layer}.{name}" for name in names}
    assert set(recorder.values) == expected
