"""The MLX port as a port under test."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import ml_dtypes
import numpy as np

from parity.blas import LEND, lend_torch_blas, lender
from parity.ports.twin import Library, TwinPort

# MLX decides at first use whether float32 products may be rounded to TF32; they may not here.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
if os.environ.get(LEND) == "1":
    lend_torch_blas()


class Mlx(Library):
    """MLX on its default device; imported when first used."""

    def to_array(self, array: np.ndarray):
        import mlx.core as mx

        array = np.ascontiguousarray(array)
        if array.dtype == ml_dtypes.bfloat16:
            return mx.array(array.view(np.uint16)).view(mx.bfloat16)
        return mx.array(array)

    def to_numpy(self, array) -> np.ndarray:
        import mlx.core as mx

        if array.dtype == mx.bfloat16:
            return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
        result = np.array(array)
        return result.astype(np.int64) if np.issubdtype(result.dtype, np.integer) else result

    def compute(self, arrays: Iterable) -> None:
        import mlx.core as mx

        mx.eval(list(arrays))

    def computing(self) -> AbstractContextManager:
        return nullcontext()

    def versions(self) -> dict[str, str]:
        import mlx.core as mx

        return {
            "mlx": mx.__version__,
            "device": str(mx.default_device()),
            "matrix product": lender(),
            "MLX_ENABLE_TF32": os.environ["MLX_ENABLE_TF32"],
        }


class MlxPort(TwinPort):
    """The MLX port also opens what the converter writes."""

    converted = True


PORT = MlxPort("mlx", "port", Mlx())
