import mlx.core as mx
import numpy as np
import pytest

from port.cache import new_cache
from port.tests.models import mini_config, randn, random_model, relative_rms, same_bits
from port.text import DecoderLayer
from reference.errors import InputError
from reference.taps import Recorder, recording

IDS = mx.array(np.random.default_rng(0).integers(0, 320, (2, 9)))
SMALL = {"num_hidden_layers": 4, "attn_res_block_size": 2}
KINDS = {"kda_layers": [1, 2, 4], "full_attn_layers": [3]}

SETTINGS = {
    "unbounded gate": ({"gate_lower_bound": None}, {}),
    "another bound": ({"gate_lower_bound": -2.0}, {}),
    "low-rank gate": ({"use_full_rank_gate": None}, {}),
    "more heads than head_dim": ({"num_heads": 6, "head_dim": 4}, {}),
    "one KDA head": ({"num_heads": 1, "head_dim": 8}, {}),
    "kernel 1": ({"short_conv_kernel_size": 1}, {}),
    "kernel 2": ({"short_conv_kernel_size": 2}, {}),
    "kernel 6": ({"short_conv_kernel_size": 6}, {}),
    "all KDA": ({"kda_layers": [1, 2, 3, 4], "full_attn_layers": []}, {}),
    "all MLA": ({"kda_layers": [], "full_attn_layers": [1, 2, 3, 4]}, {}),
    "direct query": ({}, {"q_lora_rank": None}),
    "no output gate": ({}, {"mla_use_output_gate": None}),
    "three MLA heads": ({}, {"num_attention_heads": 3, "num_key_value_heads": 3, "v_head_dim": 24}),
    "no latent": ({}, {"routed_expert_hidden_size": None}),
    "no latent norm": ({}, {"latent_moe_use_norm": False}),
    "plain residual": ({}, {"attn_res_block_size": None}),
    "every layer a block": ({}, {"attn_res_block_size": 1}),
    "one block": ({}, {"attn_res_block_size": 12}),
    "expert groups": ({}, {"num_expert_group": 4, "topk_group": 2}),
    "softmax router": ({}, {"moe_router_activation_func": "softmax"}),
    # The norm after the routed sum would hide a common factor.
    "no renormalization": ({}, {"moe_renormalize": False, "latent_moe_use_norm": None}),
    "scaling": ({}, {"routed_scaling_factor": 2.5, "latent_moe_use_norm": None}),
    "top one": ({}, {"num_experts_per_token": 1}),
    "every expert": ({}, {"num_experts_per_token": 8}),
    "no linear bound": ({}, {"activation_situ_linear_beta": None}),
    "other bounds": ({}, {"activation_situ_beta": 1.0, "activation_situ_linear_beta": 2.0}),
    "SiLU": ({}, {"hidden_act": "silu"}),
    "no shared experts": ({}, {"num_shared_experts": None}),
    "three dense layers": ({}, {"first_k_dense_replace": 3}),
    "no dense layer": ({}, {"first_k_dense_replace": 0}),
    "every second layer MoE": ({}, {"moe_layer_freq": 2}),
    "another epsilon": ({}, {"rms_norm_eps": 0.1}),
}


def small_config(linear, text):
    return mini_config(KINDS | linear, **(SMALL | text))


def fed(model, ids, sizes, mask=None, embeddings=None):
    """Logits of the pieces of one cache, joined."""
    config, parts, start = model.config.text_config, [], 0
    cache = new_cache(config, ids.shape[0], "float32")
    for size in sizes:
        piece = slice(start, start + size)
        own = None if mask is None else mask[:, piece]
        if embeddings is None:
            parts.append(model(ids[:, piece], attention_mask=own, cache=cache))
        else:
            parts.append(model(inputs_embeds=embeddings[:, piece], attention_mask=own, cache=cache))
        start += size
    return mx.concatenate(parts, axis=1)


@pytest.fixture(scope="module")
def mini():
    return random_model(mini_config())


@pytest.fixture(scope="module")
def unchanged():
    """Logits of the small configuration and of the same without a latent norm."""
    bases = ({}, {"latent_moe_use_norm": None})
    return [random_model(small_config({}, text))(IDS[:, :6]) for text in bases]


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_acts_and_decodes_like_one_pass(unchanged, setting):
    model = random_model(small_config(*SETTINGS[setting]))
    logits = model(IDS[:, :6])
    assert mx.all(mx.isfinite(logits)).item()
    assert all(relative_rms(logits, other) > 1e-3 for other in unchanged if setting != "no latent norm")
    assert relative_rms(fed(model, IDS, [5, 1]), logits) < 5e-5


@pytest.mark.parametrize("setting", ["no latent", "no latent norm", "SiLU", "expert groups"])
def test_dense_experts_decode_like_one_pass(setting):
    model = random_model(small_config(*SETTINGS[setting]), "dense")
    assert relative_rms(fed(model, IDS, [5, 1]), model(IDS[:, :6])) < 5e-5


@pytest.mark.parametrize("sizes", [[1] * 9, [8, 1], [1, 8], [2, 3, 4]])
def test_every_split_equals_one_pass(mini, sizes):
    assert relative_rms(fed(mini, IDS, sizes), mini(IDS)) < 5e-5


@pytest.mark.parametrize("sizes", [[9], [3, 6], [2, 1, 1, 5]])
def test_padded_rows_equal_rows_alone_and_padding_moves_no_bit(mini, sizes):
    """Left, right, both; padding longer than a chunk; rows shorter than the convolution's window; NaN and 1e30."""
    ids = mx.broadcast_to(IDS[:1], (5, 9))
    mask = mx.array(
        [[0] * 7 + [1, 1], [1] + [0] * 8, [0, 0, 0, 1, 1, 1, 1, 0, 0], [1] * 9, [1, 0, 1, 1, 0, 1, 0, 0, 1]]
    )
    embeddings = mini.language_model.model.embed(ids)
    results = []
    for fill in (mx.nan, 1e30):
        filled = mx.where(mask[..., None] == 1, embeddings, fill)
        results.append(mx.where(mask[..., None] == 1, fed(mini, ids, sizes, mask, filled), 0))
    assert same_bits(*results)
    for row in range(5):
        real = mx.array(np.flatnonzero(np.array(mask[row])).tolist())
        assert relative_rms(results[0][row, real], mini(ids[row : row + 1, real])[0]) < 5e-5


def test_dense_experts_are_not_moved_by_padding_either():
    model = random_model(mini_config(), "dense")
    mask = mx.array([[0, 0, 1, 1], [1, 1, 1, 0]])
    embeddings = model.language_model.model.embed(IDS[:, :4])
    filled = [mx.where(mask[..., None] == 1, embeddings, fill) for fill in (mx.nan, 1e30)]
    logits = [mx.where(mask[..., None] == 1, model(inputs_embeds=x, attention_mask=mask), 0) for x in filled]
    assert same_bits(*logits)


@pytest.mark.parametrize(
    "layers, block_size, appended", [(1, 12, 1), (11, 12, 1), (13, 12, 2), (6, 3, 2), (7, 3, 3), (3, 1, 3)]
)
def test_the_stack_can_be_cut_at_every_layer(layers, block_size, appended):
    """All that passes a boundary is the prefix sum and the list of blocks; a layer leaves its caller's list alone."""
    kinds = {"kda_layers": list(range(1, layers + 1)), "full_attn_layers": []}
    model = random_model(
        mini_config(kinds, num_hidden_layers=layers, attn_res_block_size=block_size, first_k_dense_replace=layers)
    ).language_model.model
    x, blocks = randn(1, 3, 64), []
    truth = model(x)
    for layer in model.layers:
        handed = list(blocks)
        x, after = layer(x, blocks)
        assert len(blocks) == len(handed) and all(a is b for a, b in zip(blocks, handed, strict=True))
        blocks = after
    assert len(blocks) == appended
    assert same_bits(model.output(x, blocks), truth)


def test_a_layer_by_definition(mini):
    layer: DecoderLayer = mini.language_model.model.layers[4]
    prefix_sum, blocks = randn(1, 4, 64), [randn(1, 4, 64, seed=seed) for seed in (1, 2)]
    attended = layer.attend(layer.attention_input(prefix_sum, blocks))
    middle = prefix_sum + attended
    after = middle + layer.feed_forward(layer.mlp_input(middle, blocks))
    found, same_blocks = layer(prefix_sum, blocks)
    assert same_bits(found, after) and len(same_blocks) == 2
    first = mini.language_model.model.layers[3]
    attended = first.attend(first.attention_input(prefix_sum, blocks))
    after = attended + first.feed_forward(first.mlp_input(attended, [*blocks, prefix_sum]))
    found, more_blocks = first(prefix_sum, blocks)
    assert same_bits(found, after) and same_bits(more_blocks[2], prefix_sum)


def test_the_last_mix_comes_before_the_last_norm(mini):
    model = mini.language_model.model
    prefix_sum, block = randn(1, 2, 64), 5 * randn(1, 2, 64, seed=1)
    mixed = model.output(prefix_sum, [block])
    assert relative_rms(mixed, model.norm(prefix_sum)) > 0.1
    model.output_attn_res_proj.weight, kept = mx.zeros((1, 64)), model.output_attn_res_proj.weight
    assert relative_rms(model.output(prefix_sum, [block]), model.norm((prefix_sum + block) / 2)) < 1e-6
    model.output_attn_res_proj.weight = kept


@pytest.mark.parametrize("bad", [-1, 320, 2**31])
def test_ids_outside_the_vocabulary_are_refused_before_anything_moves(mini, bad):
    cache = new_cache(mini.config.text_config, 1, "float32")
    with pytest.raises(InputError, match=r"ids in \[0, 320\)"):
        mini(mx.array([[1, bad, 2]]), cache=cache)
    assert cache.length == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "neither"),
        ({"input_ids": IDS, "inputs_embeds": randn(2, 9, 64)}, "both"),
        ({"input_ids": IDS[0]}, "integers"),
        ({"input_ids": IDS * 1.0}, "integers"),
        ({"input_ids": IDS[:, :0]}, "integers"),
        ({"inputs_embeds": randn(2, 64)}, "hidden"),
        ({"inputs_embeds": randn(2, 9, 64).astype(mx.bfloat16)}, "dtype"),
        ({"input_ids": IDS, "attention_mask": mx.ones((2, 8))}, "token_mask"),
        ({"input_ids": IDS, "attention_mask": mx.full((2, 9), 2)}, "only 0 and 1"),
        ({"input_ids": IDS, "cache": new_cache(mini_config().text_config, 3, "float32")}, "cache"),
        ({"input_ids": IDS, "cache": new_cache(mini_config().text_config, 2, "bfloat16")}, "cache"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(mini, arguments, message):
    with pytest.raises(InputError, match=message) as error:
        mini(**arguments)
    assert "\n" not in str(error.value)


def test_every_named_quantity_is_tapped(mini):
    with recording(Recorder()) as recorder:
        logits = mini(IDS)
    layers = "language_model.model.layers."
    kda = {f"self_attn.{name}" for name in ("q", "k", "v", "log_decay", "beta", "core", "state")}
    mla = {f"self_attn.{name}" for name in ("query", "latent", "key_rope", "attention")}
    moe = {"router.scores", "router.margin", "router.indices", "router.weights", "moe.latent", "moe.routed"}
    both = {"self_attn.input", "self_attn.output", "mlp.input", "mlp.output", "output"}
    expected = {"logits", "language_model.model.norm.output", "language_model.model.embed_tokens.output"}
    for layer in range(6):
        names = both | (mla if layer in (3, 5) else kda) | (moe if layer else set())
        expected |= {f"{layers}{layer}.{name}" for name in names}
    assert set(recorder.values) == expected
    assert same_bits(recorder.values["logits"], logits)
    assert recorder.values[f"{layers}1.self_attn.q"].shape == (2, 9, 4, 32)
    assert recorder.values[f"{layers}1.self_attn.beta"].shape == (2, 9, 4)
    assert recorder.values[f"{layers}1.router.indices"].shape == (18, 3)
    assert recorder.values[f"{layers}3.self_attn.query"].shape == (2, 9, 4, 24)
