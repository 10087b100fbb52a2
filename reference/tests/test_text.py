import pytest
import torch

from reference.cache import new_cache
from reference.errors import InputError
from reference.taps import Recorder, recording
from reference.tests.models import SETTINGS, mini_config, randn, random_model, small_config

IDS = torch.randint(0, 300, (3, 8), generator=torch.Generator().manual_seed(0))

CONFIG = mini_config()
MODEL = random_model(CONFIG)
BASE = MODEL(IDS)


@pytest.fixture(scope="module")
def bases():
    """Logits without any setting, and without the norm behind the experts, which would hide their weights' scale."""
    return {norm: random_model(small_config(latent_moe_use_norm=norm))(IDS) for norm in (True, False)}


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_acts_and_decodes_like_one_pass(setting, bases):
    linear, text = SETTINGS[setting]
    config = small_config(linear, **text)
    model, cache = random_model(config), new_cache(config.text_config, 3, "float64")
    whole, base = model(IDS), bases[setting not in ("not renormalized", "scaled routing")]
    assert whole.isfinite().all()
    assert not torch.allclose(whole, base, rtol=1e-3, atol=1e-3)
    parts = [model(part, cache=cache) for part in IDS.split([5, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("sizes", [[1, 7], [2, 6], [4, 4], [7, 1], [1] * 8, [3, 3, 2]], ids=str)
def test_every_split_equals_one_pass(sizes):
    cache = new_cache(CONFIG.text_config, 3, "float64")
    parts = [MODEL(part, cache=cache) for part in IDS.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), BASE, atol=1e-8, rtol=1e-8)


MASKS = {
    "left": [[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1], [1] * 8],
    "right": [[1, 1, 0, 0, 0, 0, 0, 0], [1] * 8, [1, 0, 0, 0, 0, 0, 0, 0]],
    "any": [[0, 1, 0, 1, 1, 0, 0, 1], [0, 0, 1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 1, 1, 1]],
}


@pytest.mark.parametrize("sizes", [[8], [3, 1, 4]], ids=str)
@pytest.mark.parametrize("side", MASKS)
def test_padded_rows_equal_rows_alone_and_padding_moves_no_bit(side, sizes):
    mask, x, results = torch.tensor(MASKS[side]).bool(), randn(3, 8, 64, seed=1), []
    for filling in (torch.nan, 1e30):
        padded, cache = torch.where(mask[..., None], x, filling), new_cache(CONFIG.text_config, 3, "float64")
        pairs = zip(padded.split(sizes, dim=1), mask.split(sizes, dim=1), strict=True)
        logits = [MODEL(inputs_embeds=part, attention_mask=part_mask, cache=cache) for part, part_mask in pairs]
        results.append(torch.cat(logits, dim=1)[mask])
    assert torch.equal(results[0], results[1])
    alone = [MODEL(inputs_embeds=x[row : row + 1, mask[row]])[0] for row in range(3)]
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
    tower = MODEL.language_model.model
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
    cache = new_cache(CONFIG.text_config, 1, "float64")
    with pytest.raises(InputError, match=rf"input_ids: token id: expected ids in \[0, 320\), found {bad} at \[0, 1\]"):
        MODEL(torch.tensor([[5, bad]]), cache=cache)
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
        ({"input_ids": IDS, "cache": new_cache(CONFIG.text_config, 2, "float64")}, "cache: batch"),
        ({"input_ids": IDS, "cache": new_cache(CONFIG.text_config, 3, "float32")}, "cache: batch and dtype"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(arguments, message):
    with pytest.raises(InputError, match=message) as caught:
        MODEL(**arguments)
    assert "\n" not in str(caught.value)


def test_every_named_quantity_is_tapped():
    with recording(Recorder()) as recorder:
        MODEL(IDS)
    kda = {f"self_attn.{what}" for what in ("q", "k", "v", "log_decay", "beta", "core", "state")}
    mla = {f"self_attn.{what}" for what in ("query", "latent", "key_rope", "attention")}
    moe = {"router.scores", "router.margin", "router.indices", "router.weights", "moe.latent", "moe.routed"}
    every = {"self_attn.input", "self_attn.output", "mlp.input", "mlp.output", "output"}
    expected = {"logits", "language_model.model.embed_tokens.output", "language_model.model.norm.output"}
    for layer in range(6):
        names = every | (kda if CONFIG.text_config.is_kda(layer) else mla) | (moe if layer else set())
        expected |= {f"language_model.model.layers.{layer}.{name}" for name in names}
    assert set(recorder.values) == expected
