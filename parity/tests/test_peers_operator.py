"""Second oracles for the reference itself: fla-core's plain functions for KDA, compressed-tensors for MXFP4.

The reference and the MLX port were written side by side and could share a misreading. fla-core is by the authors of the
kernels that K3 was trained with; compressed-tensors defines the format of K3's experts.
"""

from __future__ import annotations

import numpy as np
import pytest

from parity.cases import CASES
from parity.functions import expected
from parity.metrics import relative_rms
from parity.ports import load_port
from reference.mxfp4 import GROUP, pack, scale_values, unpack

pytestmark = pytest.mark.peers

AGREE = 1e-5
SEEDS = (0, 1)
SHARED = {case.function: case for case in CASES if case.function in load_port("fla").capabilities().functions}
REGIMES = [(name, regime) for name, case in SHARED.items() for regime in case.regimes]
FINITE_BYTES = (0, 1, 2, 64, 126, 127, 128, 200, 252)
"""A scale of 2^126 and more times 4 or 6 is infinite in bfloat16, in which compressed-tensors answers."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("function", "regime"), REGIMES)
def test_fla_agrees_with_the_reference(function: str, regime: str, seed: int):
    pytest.importorskip("fla.ops.kda")
    case = SHARED[function]
    drawn, truth, own = expected(case, regime, "float32", seed)
    arrays = {name: array.astype(np.float32) for name, array in drawn.arrays.items()}
    theirs = load_port("fla").call(function, arrays, drawn.settings)
    for name, true, near, found in zip(case.results, truth, own, theirs, strict=True):
        assert np.isfinite(found).all()
        assert relative_rms(found, true) <= AGREE, f"{name}: fla-core against float64"
        assert relative_rms(near, true) <= AGREE, f"{name}: the reference against float64"


def test_fla_was_asked_for_both_gates_and_both_forms():
    assert set(SHARED) == {"kda.recurrent_kda", "kda_chunk.chunked_kda", "kda.log_decay"}
    bounds = {
        expected(SHARED["kda.log_decay"], r, "float32", 0).drawn.settings["lower_bound"]
        for f, r in REGIMES
        if "log" in f
    }
    assert bounds == {None, -5.0}


@pytest.fixture(scope="module")
def compressor():
    """compressed-tensors' MXFP4 with K3's settings: (compress, decompress) of dictionaries of torch tensors."""
    package = pytest.importorskip("compressed_tensors.compressors.mxfp4.base")
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    settings = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": GROUP, "symmetric": True}
    weights = QuantizationArgs(**settings, scale_dtype=torch.uint8)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compress, decompress = package.MXFP4PackedCompressor.compress, package.MXFP4PackedCompressor.decompress

    def call(function, **arrays: np.ndarray) -> dict:
        return function({name: torch.from_numpy(array) for name, array in arrays.items()}, scheme)

    return (lambda **arrays: call(compress, **arrays)), (lambda **arrays: call(decompress, **arrays))


@pytest.mark.parametrize("seed", range(4))
def test_packed_bytes_are_equal(compressor, seed: int):
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((24, 96)) * 2.0 ** rng.integers(-8, 8, (24, 1))).astype(np.float32)
    packed, scale = pack(weight)
    theirs = compressor[0](weight=weight, weight_scale=scale_values(scale).astype(np.float32))
    np.testing.assert_array_equal(theirs["weight_packed"].numpy(), packed)
    np.testing.assert_array_equal(theirs["weight_scale"].numpy(), scale)


@pytest.mark.parametrize("byte", FINITE_BYTES)
def test_every_byte_means_the_same(compressor, byte: int):
    """All 256 pairs of codes under one scale, value by value: swapped nibbles could not hide."""
    packed = np.repeat(np.arange(256, dtype=np.uint8)[:, None], GROUP // 2, axis=1)
    scale = np.full((256, 1), byte, np.uint8)
    theirs = compressor[1](weight_packed=packed, weight_scale=scale)["weight"]
    np.testing.assert_array_equal(theirs.double().numpy(), unpack(packed, scale))
