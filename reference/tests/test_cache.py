import pytest
import torch

from reference.cache import KDACache, MLACache, new_cache
from reference.tests.models import mini_config, mini_text, randn, random_model

CONFIG = mini_config()
IDS = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(0))


def formula(text, batch, tokens, width):
    """Bytes that decoding needs: a KDA layer's three windows and wide state, an MLA layer's latents, keys and mask."""
    linear, layers = text.linear_attn_config, range(text.num_hidden_layers)
    state_width = max(4, width)
    window = 3 * (linear.short_conv_kernel_size - 1) * linear.width * width
    kda = window + linear.num_heads * linear.head_dim**2 * state_width
    mla = tokens * ((text.kv_lora_rank + text.qk_rope_head_dim) * width + 1)
    return batch * sum(kda if text.is_kda(layer) else mla for layer in layers)


@pytest.mark.parametrize("dtype, width", [("float32", 4), ("bfloat16", 2), ("float64", 8)])
def test_bytes_follow_the_formula_and_no_prompt_is_kept_alive(dtype, width):
    text, torch_dtype = CONFIG.text_config, getattr(torch, dtype)
    cache = new_cache(text, 2, dtype)
    assert cache.nbytes == formula(text, 2, 0, width)
    model = random_model(CONFIG, torch_dtype)
    model(IDS, cache=cache)
    assert cache.length == 9 and cache.nbytes == formula(text, 2, 9, width)
    model(IDS[:, :1], cache=cache)
    assert cache.length == 10 and cache.nbytes == formula(text, 2, 10, width)
    assert {tensor.dtype for tensor in cache.tensors()} <= {torch_dtype, torch.bool, cache.layers[0].state.dtype}


def test_one_entry_per_layer_of_its_kind():
    kinds = [type(entry) for entry in new_cache(mini_text(), 1, "float32").layers]
    assert kinds == [KDACache, KDACache, KDACache, MLACache, KDACache, MLACache]


def test_snapshot_survives_whatever_happens_to_the_live_cache():
    model, cache = random_model(CONFIG), new_cache(CONFIG.text_config, 2, "float64")
    model(IDS[:, :5], cache=cache)
    snapshot = cache.snapshot()
    expected = model(IDS[:, 5:], cache=cache)
    for _ in range(2):
        for tensor in cache.tensors():
            if tensor.dtype != torch.bool:
                tensor.fill_(torch.nan)
        cache.restore(snapshot)
        assert cache.length == 5
        assert torch.equal(model(IDS[:, 5:], cache=cache), expected)


def test_feeding_a_token_twice_changes_the_state():
    model, cache = random_model(CONFIG), new_cache(CONFIG.text_config, 2, "float64")
    model(IDS[:, :5], cache=cache)
    states = [entry.state for entry in cache.layers if isinstance(entry, KDACache)]
    model(IDS[:, 4:5], cache=cache)
    after = [entry.state for entry in cache.layers if isinstance(entry, KDACache)]
    assert all(not torch.allclose(before, now) for before, now in zip(states, after, strict=True))


def test_appending_copies():
    cache = MLACache(mini_text(), 1, torch.float64)
    latent, key_rope = randn(1, 2, 16), randn(1, 2, 8)
    cache.append(latent, key_rope, torch.ones(1, 2, dtype=torch.bool))
    before = cache.latent.clone()
    latent.fill_(torch.nan)
    assert torch.equal(cache.latent, before)
