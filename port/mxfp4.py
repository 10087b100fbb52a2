"""MXFP4 through MLX's own quantized kernels (K3.md §8).

MLX's ``mxfp4`` mode has the checkpoint's encoding: the low nibble of a byte is the even input, a scale byte stands for
``2^(byte − 127)`` and serves 32 inputs. The packed bytes, read as little-endian 32-bit words of eight codes, are used
untouched.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from reference.mxfp4 import GROUP

FORMAT = {"group_size": GROUP, "bits": 4, "mode": "mxfp4"}


def words(packed: np.ndarray) -> np.ndarray:
    """``weight_packed`` uint8 [..., n/2] -> uint32 [..., n/8], the same bytes; n is a multiple of 32."""
    return np.ascontiguousarray(packed).view("<u4")


def unpack(packed: mx.array, scale: mx.array, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Weights [..., out, n] in ``dtype`` from words uint32 [..., out, n/8] and scale bytes uint8 [..., out, n/32]."""
    return mx.dequantize(packed, scale, dtype=dtype, **FORMAT)


def gather_matmul(x: mx.array, packed: mx.array, scale: mx.array, experts: mx.array) -> mx.array:
    """``x[..., :] W[expert]ᵀ``, every row with its own matrix out of a stack.

    x [..., n] (or broadcastable to ``experts``' shape), packed uint32 [E, out, n/8], scale uint8 [E, out, n/32],
    experts [...] integers below E, unchecked -> [..., out] in x's dtype.
    """
    # MLX's CPU kernel sums in the dtype of x: in bfloat16 it errs by 0.7 to 1.2 %, a whole float32 sum by 0.17 %.
    exact = x.astype(mx.float32)[..., None, :]
    y = mx.gather_qmm(exact, packed, scale, rhs_indices=experts.astype(mx.uint32), transpose=True, **FORMAT)
    return y[..., 0, :].astype(x.dtype)
