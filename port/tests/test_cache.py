import mlx.core as mx
import pytest

from port.cache import KDACache, MLACache, new_cache
from port.tests.models import mini_config, mini_text, random_model, same_bits

IDS = mx.array([[5, 17, 200, 3, 90, 41, 7], [1, 2, 3, 4, 5, 6, 7]])


def test_one_entry_per_layer_of_its_kind():
    kinds = [type(entry) for entry in new_cache(mini_text(), 2, "float32").layers]
    assert kinds == [KDACache, KDACache, KDACache, MLACache, KDACache, MLACache]


@pytest.mark.parametrize("dtype, width", [("float32", 4), ("bfloat16", 2)])
def test_bytes_follow_the_formula_and_keep_no_prompt(dtype, width):
    """KDA entries do not grow; MLA entries hold latent, shared key part and mask per token and nothing else."""
    model, cache = random_model(mini_config(), dtype=dtype), new_cache(mini_text(), 2, dtype)
    kda = 2 * (3 * 3 * 128 * width + 4 * 32 * 32 * 4)
    assert cache.nbytes == 4 * kda
    model(IDS, cache=cache)
    assert cache.nbytes == 4 * kda + 2 * 2 * 7 * ((16 + 8) * width + 1)
    assert cache.length == 7
    assert all(
        array.dtype
        == (mx.bool_ if name == "key_mask" else mx.float32 if name == "state" else cache.layers[0].conv_q.dtype)
        for entry in cache.layers
        for name, array in vars(entry).items()
    )


def test_snapshot_survives_whatever_happens_to_the_live_cache():
    model, cache = random_model(mini_config()), new_cache(mini_text(), 2, "float32")
    model(IDS[:, :4], cache=cache)
    saved = cache.snapshot()
    truth = model(IDS[:, 4:], cache=cache)
    for _ in range(2):
        for entry in cache.layers:
            for name, array in vars(entry).items():
                array[...] = True if array.dtype == mx.bool_ else mx.nan
                setattr(entry, name, array)
        assert mx.all(mx.isnan(model(IDS[:, 4:], cache=cache))).item()
        cache.restore(saved)
        assert cache.length == 4
        assert same_bits(model(IDS[:, 4:], cache=cache), truth)


def test_feeding_a_token_twice_changes_the_state():
    model, once, twice = random_model(mini_config()), *(new_cache(mini_text(), 2, "float32") for _ in range(2))
    model(IDS[:, :3], cache=once)
    model(IDS[:, :3], cache=twice)
    model(IDS[:, 2:3], cache=twice)
    assert not mx.allclose(once.layers[0].state, twice.layers[0].state, rtol=1e-2).item()
