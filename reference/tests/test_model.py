"""The committed golden case: what the model authors' code computes on the mini checkpoint."""

import pytest
import torch
from safetensors.torch import load_file

from reference.cache import KDACache, new_cache
from reference.model import K3Model
from reference.taps import Recorder, recording
from reference.tests.models import MINI, mini_config, random_model, relative_rms
from reference.weights import load_model

INPUTS = load_file(MINI / "inputs.safetensors")
GOLDEN = load_file(MINI / "trace-float32.safetensors")
GOLDEN_BF16 = load_file(MINI / "trace-bfloat16.safetensors")
FORMS = ["chunked", "recurrent"]


def loaded(dtype, form="chunked"):
    model = load_model(MINI, dtype)
    for module in model.modules():
        if hasattr(module, "chunk_size"):
            module.form = form
    return model


def prefill(model):
    with recording(Recorder()) as recorder:
        model(INPUTS["text.input_ids"])
    return recorder.values


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_golden_tap_of_one_pass(dtype, form):
    values = prefill(loaded(dtype, form))
    expected = {name.removeprefix("prefill/"): value for name, value in GOLDEN.items() if name.startswith("prefill/")}
    assert len(expected) == 42
    for name, value in expected.items():
        if name.endswith("indices"):
            assert torch.equal(values[name], value), name
        else:
            assert relative_rms(values[name], value) < 5e-5, name


@pytest.mark.parametrize("form", FORMS)
def test_decoding_and_its_final_states(form):
    model, ids, start = loaded("float32", form), INPUTS["text.input_ids"], int(INPUTS["text.prefill_length"])
    cache = new_cache(model.config.text_config, ids.shape[0], "float32")
    steps = [ids[:, :start], *ids[:, start:].split(1, dim=1)]
    logits = torch.cat([model(step, cache=cache) for step in steps], dim=1)
    assert relative_rms(logits, GOLDEN["decode/logits"]) < 5e-5
    states = {layer: entry.state for layer, entry in enumerate(cache.layers) if isinstance(entry, KDACache)}
    assert list(states) == [0, 1, 2, 4]
    for layer, state in states.items():
        assert relative_rms(state, GOLDEN[f"decode/language_model.model.layers.{layer}.self_attn.state"]) < 5e-5


def test_padded_rows():
    real = INPUTS["padded.attention_mask"] == 1
    logits = loaded("float32")(INPUTS["padded.input_ids"], attention_mask=INPUTS["padded.attention_mask"])
    assert relative_rms(logits[real], GOLDEN["padded/logits"][real]) < 2e-4


def test_embeddings_instead_of_ids():
    mask = GOLDEN["mm/attention_mask"]
    logits = loaded("float32")(inputs_embeds=GOLDEN["mm/merged_embeds"], attention_mask=mask)
    assert relative_rms(logits[mask == 1], GOLDEN["mm/logits"][mask == 1]) < 5e-5


def isolated(model, golden):
    """(name, value, expected) of every layer's parts, each fed with the golden input of that part."""
    tower = model.language_model.model
    p, blocks = tower.embed(INPUTS["text.input_ids"]), []
    for number, layer in enumerate(tower.layers):
        parts = ("self_attn.input", "self_attn.output", "mlp.input", "mlp.output", "output")
        attention_input, attended, mlp_input, fed, output = (
            golden[f"prefill/{layer.tap_path}.{part}"] for part in parts
        )
        yield f"{number}.attention_input", layer.attention_input(p, blocks), attention_input
        yield f"{number}.self_attn", layer.attend(attention_input), attended
        starts = number % model.config.text_config.attn_res_block_size == 0
        p, blocks = (attended, [*blocks, p]) if starts else (p + attended, blocks)
        yield f"{number}.mlp_input", layer.mlp_input(p, blocks), mlp_input
        yield f"{number}.feed_forward", layer.feed_forward(mlp_input), fed
        yield f"{number}.output", p + fed, output
        p = output
    normed = golden["prefill/language_model.model.norm.output"]
    yield "norm", tower.output(p, blocks), normed
    yield "logits", model.language_model.lm_head(normed), golden["prefill/logits"]


def test_isolated_modules_in_float32():
    for name, value, expected in isolated(loaded("float32"), GOLDEN):
        assert relative_rms(value, expected) < 2e-6, name


def test_isolated_modules_round_like_the_authors_code_in_bfloat16():
    """Away from rounding boundaries the bits are equal; a wrong rounding point moves hundreds of a module's values."""
    for name, value, expected in isolated(loaded("bfloat16"), GOLDEN_BF16):
        assert value.dtype == torch.bfloat16
        assert (value != expected).float().mean() < 0.01, name
        assert relative_rms(value, expected) < 1e-3, name


def test_taps_change_nothing():
    model = random_model(mini_config())
    ids = INPUTS["text.input_ids"]
    with recording(Recorder()):
        watched = model(ids)
    assert torch.equal(model(ids), watched)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_mask_may_be_of_any_dtype_and_all_ones_is_no_mask(dtype):
    model, ids = random_model(mini_config()), INPUTS["text.input_ids"]
    assert torch.equal(model(ids, attention_mask=torch.ones(ids.shape, dtype=dtype)), model(ids))


def test_imposed_routing_reaches_the_named_layer():
    model, ids = random_model(mini_config()), INPUTS["text.input_ids"]
    name = "language_model.model.layers.3.router.indices"
    choice = torch.tensor([[0, 1, 2]] * ids.numel())
    with recording(Recorder({name: choice})) as recorder:
        imposed = model(ids)
    assert torch.equal(recorder.values[name], choice)
    assert not torch.allclose(imposed, model(ids))


def test_an_unloaded_model_gives_nan():
    assert K3Model(mini_config())(INPUTS["text.input_ids"]).isnan().all()
