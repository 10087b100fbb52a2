"""MXFP4 through MLX's own quantized kernels (K3.md §8).

MLX's ``mxfp4`` mode has the checkpoint's encoding: the low nibble of a byte is the even input, a scale byte stands for
``2^(byte − 127)`` and serves 32 inputs. The packed bytes, read as little-endian 32-bit words of eight codes, are used
untouched.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from reference.mxfp4 import GROUP, NAN_SCALE

CODES_PER_WORD = 8
FORMAT = {"group_size": GROUP, "bits": 4, "mode": "mxfp4"}


def words(packed: mx.array) -> mx.array:
    """``weight_packed`` uint8 [..., n/2] -> uint32 [..., n/8], the same bytes; n is a multiple of 32."""
    return packed.view(mx.uint32)


def unpack(packed: mx.array, scale: mx.array, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Weights [..., out, n] in ``dtype`` from words uint32 [..., out, n/8] and scale bytes uint8 [..., out, n/32]."""
    return mx.dequantize(packed, scale, dtype=dtype, **FORMAT)


def gather_matmul(x: mx.array, packed: mx.array, scale: mx.array, chosen: mx.array) -> mx.array:
    """``W x``, each row with the matrix that ``chosen`` names out of a stack.

    x [N, 1 or k, n], packed uint32 [E, out, n/8], scale uint8 [E, out, n/32], chosen [N, k] < E, unchecked
    -> [N, k, out] in x's dtype.
    """
    # MLX's CPU kernel sums in the dtype of x: in bfloat16 it errs by 0.6 to 1.2 %, where one rounding costs 0.17 %.
    x_wide = x.astype(mx.float32)[..., None, :]
    y = mx.gather_qmm(x_wide, packed, scale, rhs_indices=chosen.astype(mx.uint32), transpose=True, **FORMAT)
    return y[..., 0, :].astype(x.dtype)


class MXFP4Linear(nn.Module):
    """``y = W x`` with W in MXFP4, each row with the matrix of its own expert.

    ``weight_packed`` uint32 [E, out, in/8], ``weight_scale`` uint8 [E, out, in/32]. Until it is loaded every code is 0
    and every scale byte 255, which MLX takes for infinity, so that the weight is NaN.
    """

    def __init__(self, experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight_packed = mx.zeros((experts, out_features, in_features // CODES_PER_WORD), mx.uint32)
        self.weight_scale = mx.full((experts, out_features, in_features // GROUP), NAN_SCALE, mx.uint8)

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        """x [N, 1 or k, in], chosen [N, k] < E -> [N, k, out], in x's dtype."""
        return gather_matmul(x, self.weight_packed, self.weight_scale, chosen)
