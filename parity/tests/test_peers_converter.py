"""Stock mlx-lm and mlx-vlm on converted folders, beside our port on the same folders (K3.md §15).

mlx-lm 0.32.2 has three limits, each shown below: no SiLU, no softmax router (it says so when it builds the model), and
masked expert groups score 0 instead of −inf, so that a negative biased score loses to them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fixtures.build import cached
from fixtures.catalogue import CATALOGUE, entry
from fixtures.inputs import multimodal_inputs, token_ids
from fixtures.widened import widened
from parity.metrics import relative_rms

pytestmark = pytest.mark.peers

TIERS = ("mxfp4", "3bit", "mixed2", "2bit")
ALLOWED = 2e-4
"""Relative RMS of float32 logits; 6e-7 … 6e-6 here, and 1.1e-4 over the 25 layers of "long"."""
NO_SILU, NO_SOFTMAX = "Unsupported activation 'silu'", "Unsupported MoE router activation 'softmax'"
REFUSED_BY_THEM = {"silu": NO_SILU, "kimi-linear": NO_SILU, "softmax-router": NO_SOFTMAX}
GROUPED = ("groups",)


@pytest.fixture(scope="module", autouse=True)
def mlx_lm():
    """Imported when the first test runs, not when tests are collected: it takes seconds."""
    return pytest.importorskip("mlx_lm")


def converted(item, tier: str, folder: Path, **more) -> Path:
    from port.convert import convert

    convert(cached(item), folder, tier, sync=False, **more)
    return folder


def ours(folder: Path, ids: np.ndarray) -> np.ndarray:
    import mlx.core as mx

    from port.weights import load_model

    return np.array(load_model(folder)(mx.array(ids)))


def theirs(folder: Path, ids: np.ndarray, raise_bias: float = 0.0) -> np.ndarray:
    """mlx-lm's logits with float32 activations; ``raise_bias`` is added to every correction bias."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    for layer in model.language_model.model.layers if hasattr(model, "language_model") else model.model.layers:
        if hasattr(layer.mlp, "e_score_correction_bias"):
            layer.mlp.e_score_correction_bias = layer.mlp.e_score_correction_bias + raise_bias
    return np.array(model(mx.array(ids)))


def cases() -> list:
    """Every entry in every tier that can hold it as it is, and widened in the others."""
    result = []
    for name, item in CATALOGUE.items():
        for tier in TIERS:
            if not (tier == "mxfp4" and item.expert_format == "dense"):
                result.append(pytest.param(name, tier, id=f"{name}-{tier}"))
    return result


def fitting(name: str, tier: str):
    """The entry, or where the tier's group of 64 does not divide an expert's width, the entry widened."""
    from port.tiers import check_experts, tier_named
    from reference.errors import InputError

    item = entry(name)
    try:
        check_experts(item.parsed, item.expert_format, tier_named(tier), name)
    except InputError:
        return widened(item)
    return item


@pytest.mark.parametrize(("name", "tier"), cases())
def test_mlx_lm_and_our_port_give_the_same_logits(name: str, tier: str, tmp_path: Path):
    item = fitting(name, tier)
    folder = converted(item, tier, tmp_path / "out")
    ids = token_ids(item, "peers.input_ids", (2, 24))
    expected = ours(folder, ids)
    if name in REFUSED_BY_THEM:
        with pytest.raises(ValueError, match=REFUSED_BY_THEM[name]):
            theirs(folder, ids)
        return
    found = theirs(folder, ids)
    if name in GROUPED:
        assert relative_rms(found, expected) > 1000 * ALLOWED
        found = theirs(folder, ids, raise_bias=2.0)
    assert relative_rms(found, expected) <= ALLOWED


@pytest.mark.parametrize(("tier", "bits"), [*((tier, None) for tier in TIERS), ("mxfp4", 8), ("mixed2", 8)])
def test_mlx_lm_loads_and_generates_without_custom_code(tier: str, bits: int | None, tmp_path: Path):
    import mlx_lm

    folder = converted(entry("quantizable"), tier, tmp_path / "out", nonexpert_bits=bits)
    model, tokenizer = mlx_lm.load(str(folder))
    text = mlx_lm.generate(model, tokenizer, prompt="Hello world", max_tokens=4)
    assert isinstance(text, str) and text
    ids = token_ids(entry("quantizable"), "peers.input_ids", (2, 24))
    assert relative_rms(theirs(folder, ids), ours(folder, ids)) <= ALLOWED


def test_a_quantized_kv_b_is_read_as_two_maps(tmp_path: Path):
    """Wide enough keys: ``embed_q`` and ``unembed_out`` are written quantized, and read by both."""
    from fixtures.base import merged
    from fixtures.catalogue import Entry

    wide = merged(entry("quantizable").config, {"text_config": {"qk_nope_head_dim": 64}})
    item = Entry("wide-keys", wide)
    folder = converted(item, "2bit", tmp_path / "out")
    ids = token_ids(item, "peers.input_ids", (2, 24))
    assert relative_rms(theirs(folder, ids), ours(folder, ids)) <= ALLOWED


@pytest.mark.parametrize("tier", TIERS)
def test_a_pruned_folder_is_a_model_like_any_other(tier: str, tmp_path: Path):
    item = widened(entry("mini"))
    plan = {layer: [7, 0, 5, 2, 3] for layer in (1, 2, 3, 4)}
    folder = converted(item, tier, tmp_path / "out", plan=plan)
    ids = token_ids(item, "peers.input_ids", (2, 24))
    assert relative_rms(theirs(folder, ids), ours(folder, ids)) <= ALLOWED


@pytest.mark.parametrize("tier", TIERS)
def test_mlx_vlm_loads_the_whole_model(tier: str, tmp_path: Path):
    """Vision tower and projector in the source's bf16, bit for bit; text logits as ours; processor files carried."""
    pytest.importorskip("mlx_vlm")
    import mlx.core as mx
    from mlx_vlm import load
    from mlx_vlm.utils import load_model

    from parity.dequantized import Folder
    from reference.shards import Shards

    item = entry("quantizable")
    folder = converted(item, tier, tmp_path / "out")
    model, processor = load(str(folder))
    assert processor.tokenizer.encode("Hello world", add_special_tokens=False)
    source, result = Shards(cached(item)), Folder(folder)
    vision = [name for name in source.names if name.startswith(("vision_tower.", "mm_projector."))]
    for name in vision:
        assert result.array(name).dtype == source.read(name).dtype
        assert result.array(name).tobytes() == source.read(name).tobytes(), name
    kinds = {str(array.dtype) for _, array in flat(model.vision_tower) + flat(model.mm_projector)}
    assert kinds == {"mlx.core.bfloat16"}
    model = load_model(folder)
    model.set_dtype(mx.float32)
    ids = token_ids(item, "peers.input_ids", (2, 24))
    logits = model.language_model(mx.array(ids))
    assert relative_rms(np.array(getattr(logits, "logits", logits)), ours(folder, ids)) <= ALLOWED


def flat(module) -> list:
    from mlx.utils import tree_flatten

    return tree_flatten(module.parameters())


def test_mlx_vlm_sees_a_picture_as_our_port_does(tmp_path: Path):
    """A picture in the prompt of a 2-bit folder; mlx-vlm's eps of 2^-7 in the tower is put into ours."""
    pytest.importorskip("mlx_vlm")
    import mlx.core as mx
    from mlx_vlm.utils import load_model as their_load

    from port.vision import VisionNorm
    from port.weights import load_model

    item = entry("quantizable")
    folder = converted(item, "2bit", tmp_path / "out")
    inputs = multimodal_inputs(item)
    row = inputs["attention_mask"][0].astype(bool)
    ids, placeholder = inputs["input_ids"][:1, row], item.parsed.media_placeholder_token_id
    grids = inputs["grid_thws"][: int((ids == placeholder).sum())]
    pixels = inputs["pixel_values"][: int(grids.prod(-1).sum())]
    model = load_model(folder)
    norms = [module for _, module in model.vision_tower.named_modules() if isinstance(module, VisionNorm)]
    assert norms
    for norm in norms:
        norm.eps = 2**-7
    expected = np.array(model(mx.array(ids), pixel_values=mx.array(pixels), grid_thws=mx.array(grids)))
    their_model = their_load(folder)
    their_model.set_dtype(mx.float32)
    area = np.prod(item.parsed.vision_config.merge_kernel_size)
    rows = iter((grids[:, 1] * grids[:, 2] // area).tolist())
    repeated = [[i] * (next(rows) if i == placeholder else 1) for i in ids[0].tolist()]
    spread = mx.array([[i for part in repeated for i in part]])
    found = their_model(spread, mx.array(pixels), grid_thws=mx.array(grids))
    assert relative_rms(np.array(getattr(found, "logits", found)), expected) <= ALLOWED
