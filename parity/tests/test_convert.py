"""What a conversion writes: bytes, configuration, carried files; and what it refuses (K3.md §8, §15)."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.build import cached
from fixtures.catalogue import CATALOGUE, entry
from fixtures.widened import widened
from parity.checks import converter as check
from parity.checks.plan import Plan, case_named
from parity.dequantized import affine_codes
from parity.ports import load_port
from parity.requantization import AFFINE4_BAND, BANDS, affine_error, expert_error, released_looking
from port import tiers, writers
from port.convert import convert, prepare
from port.output_config import RECORD, is_converted, read_conversion
from port.requantize import dequantize_mxfp4, quantize
from port.requantize_mxfp4 import requantize
from port.tiers import TIERS, Format, tier_named
from port.weights import load_model
from reference.config import K3Config
from reference.errors import InputError
from reference.mxfp4 import unpack

MEASURED_REFUSALS = {"mxfp4": 1, "3bit": 37, "mixed2": 37, "2bit": 37}
"""How many entries of the catalogue a tier refuses. Widened, they all convert, but for dense experts in mxfp4."""


@pytest.fixture(scope="module")
def source() -> Path:
    return cached(entry("quantizable"))


@pytest.fixture(scope="module")
def folders(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("converted")
    for tier in TIERS:
        convert(source, root / tier, tier, sync=False)
    return {tier: root / tier for tier in TIERS}


@pytest.mark.parametrize("tier", TIERS)
def test_a_width_that_is_no_whole_group_is_refused_before_anything_is_written(tier: str, tmp_path: Path):
    refused = 0
    for item in CATALOGUE.values():
        folder = cached(item)
        try:
            prepare(folder, tier)
        except InputError as error:
            refused += 1
            assert "\n" not in str(error) and str(folder) in str(error)
            with pytest.raises(InputError):
                convert(folder, tmp_path / "out", tier)
    assert not list(tmp_path.iterdir())
    assert refused == MEASURED_REFUSALS[tier]


@pytest.mark.parametrize("tier", TIERS)
def test_the_whole_catalogue_widened_is_accepted(tier: str):
    for item in CATALOGUE.values():
        wide = widened(item)
        if tier == "mxfp4" and wide.expert_format == "dense":
            continue
        assert list(tiers.outputs(wide.parsed, wide.expert_format, tier_named(tier)))


def test_configuration_is_written_for_stock_loaders(source: Path, folders: dict[str, Path]):
    before = json.loads((source / "config.json").read_text())
    for tier, folder in folders.items():
        after = json.loads((folder / "config.json").read_text())
        assert "compressed-tensors" not in json.dumps(after)
        assert after["quantization"] == after["quantization_config"]
        experts = asdict(TIERS[tier].experts)
        assert {key: after["quantization"][key] for key in experts} == experts
        record = after.pop(RECORD)
        assert (record["tier"], record["plan"]) == (tier, None)
        for block in ("quantization", "quantization_config"):
            after.pop(block)
        before["text_config"].pop("quantization_config", None)
        assert after == before
        assert is_converted(folder) and read_conversion(folder).config == K3Config.from_file(source)
    assert not is_converted(source)


def test_tokenizer_and_processor_files_come_along(source: Path, folders: dict[str, Path]):
    carried = {"generation_config.json", "preprocessor_config.json", "tiktoken.model", "tokenizer_config.json"}
    for folder in folders.values():
        for name in carried:
            assert (folder / name).read_bytes() == (source / name).read_bytes()
        shards = {path.name for path in folder.glob("model-*.safetensors")}
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert shards == set(index["weight_map"].values())
        assert {path.name for path in folder.iterdir()} == carried | shards | {
            "config.json", "model.safetensors.index.json"
        }  # fmt: skip


def test_converted_folders_load_in_bfloat16_too(folders: dict[str, Path]):
    """A token whose experts change with the rounding is far off; the middle one is not."""
    ids = mx.arange(20)[None]
    for folder in folders.values():
        wide, narrow = (load_model(folder, dtype)(ids)[0] for dtype in ("float32", "bfloat16"))
        assert (wide.dtype, narrow.dtype) == (mx.float32, mx.bfloat16)
        apart = mx.linalg.norm(wide - narrow, axis=-1) / mx.linalg.norm(wide, axis=-1)
        assert 1e-3 < float(np.median(np.array(apart))) < 0.15


@given(seed=st.integers(0, 2**32 - 1))
def test_dequantizing_is_exact(seed: int):
    draw = np.random.default_rng(seed)
    packed = draw.integers(0, 256, (5, 64), np.uint8)
    scale = draw.integers(0, 250, (5, 4), np.uint8)
    np.testing.assert_array_equal(dequantize_mxfp4(packed, scale), unpack(packed, scale).astype(np.float32))


@given(seed=st.integers(0, 2**32 - 1), bits=st.sampled_from([2, 3, 4, 8]), spread=st.sampled_from([1, 6, 250]))
def test_requantizing_is_mlx_quantize_bit_for_bit(seed: int, bits: int, spread: int):
    """Any codes and scales; groups of zeros, of minus zeros, of one sign, of one value; more rows than a block has."""
    draw = np.random.default_rng(seed)
    packed = draw.integers(0, 256, (150, 640), np.uint8)
    scale = draw.integers(125 - spread // 2, 126 + spread // 2, (150, 40)).astype(np.uint8)
    for rows, change in ((slice(9), 0x00), (slice(9, 19), 0x88), (slice(19, 29), 0x77), (slice(29, 39), 0x11)):
        packed[rows] &= change
    packed[39:49] |= 0x88
    packed[49:59] = 0xB3
    format = Format("affine", bits, 64)
    expected = quantize(dequantize_mxfp4(packed, scale), format)
    for found, wanted in zip(requantize(packed, scale, format), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("scale", [255, 254])
@pytest.mark.parametrize("function", [dequantize_mxfp4, lambda p, s: requantize(p, s, Format("affine", 2, 64))])
def test_scales_that_are_nan_or_overflow_are_refused(scale: int, function):
    packed = np.full((1, 32), 0x77, np.uint8)
    with pytest.raises(ValueError, match="NaN" if scale == 255 else "overflow"):
        function(packed, np.full((1, 2), scale, np.uint8))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_are_those_of_mlx_and_of_the_bit_stream(bits: int):
    """Codes of ``mx.quantize``; scales and biases rounded once, to bfloat16; read back by the second reader."""
    weights = np.random.default_rng(bits).standard_normal((7, 192)).astype(np.float32)
    codes, scales, biases = quantize(weights, Format("affine", bits, 64))
    theirs = [np.array(x) for x in mx.quantize(mx.array(weights), group_size=64, bits=bits)]
    np.testing.assert_array_equal(codes, theirs[0])
    for half, full in zip((scales, biases), theirs[1:], strict=True):
        np.testing.assert_array_equal(half.view(ml_dtypes.bfloat16), full.astype(ml_dtypes.bfloat16))
    ones, zeros = (mx.full((7, 3), float(value)) for value in (1, 0))
    plain = mx.dequantize(mx.array(codes), ones, zeros, group_size=64, bits=bits)
    np.testing.assert_array_equal(affine_codes(codes, bits), np.array(plain))


@pytest.mark.parametrize("tier", BANDS)
def test_requantizing_costs_what_is_stated(tier: str):
    """Measured: 0.194 in three bits, 0.41 in two."""
    low, high = BANDS[tier]
    assert all(low < expert_error(tier, seed) < high for seed in range(3))


def test_affine_4_bit_would_be_larger_and_lossy():
    """Why it is no tier: 4.5 bits a weight where MXFP4 has 4.25, and 9.5 % lost."""
    low, high = AFFINE4_BAND
    assert low < affine_error(*released_looking(), 4) < high
    assert Format("affine", 4, 64) not in {tier.experts for tier in TIERS.values()}


def rolled(packed: np.ndarray, scale: np.ndarray, format: Format):
    return requantize(np.roll(packed, 1, axis=0), np.roll(scale, 1, axis=0), format)


FAULTS = {
    "w1 and w3 exchanged": (tiers, "EXPERT_NAMES", {"w1": "up_proj", "w2": "down_proj", "w3": "gate_proj"}),
    "nibbles swapped": (writers, "requantize", lambda p, s, f: requantize(p >> 4 | p << 4, s, f)),
    "scales off by one": (writers, "requantize", lambda p, s, f: requantize(p, s + np.uint8(1), f)),
    "rows rolled": (writers, "requantize", rolled),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_converter_is_found(fault: str, monkeypatch: pytest.MonkeyPatch):
    module, name, wrong = FAULTS[fault]
    monkeypatch.setattr(module, name, wrong)
    monkeypatch.setattr(check, "TIERS", ("2bit",))
    findings = list(check.run(Plan(load_port("mlx"), (case_named("quantizable"),))))
    assert "fail" in {finding.status for finding in findings}
