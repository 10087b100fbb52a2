"""The PyTorch reference as a port; in float64 it is the truth that the harness measures against."""

from __future__ import annotations

from contextlib import AbstractContextManager

import ml_dtypes
import numpy as np

from parity.ports.twin import Library, TwinPort


class Torch(Library):
    """torch on the CPU; it is imported when first used, so that loading the harness does not need it."""

    def to_array(self, array: np.ndarray):
        import torch

        array = np.ascontiguousarray(array)
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(array.copy())

    def to_numpy(self, array) -> np.ndarray:
        import torch

        array = array.detach().contiguous()
        if array.dtype == torch.bfloat16:
            return array.view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
        return array.numpy().copy()

    def computing(self) -> AbstractContextManager:
        import torch

        return torch.inference_mode()

    def versions(self) -> dict[str, str]:
        import torch

        return {"torch": torch.__version__, "threads": str(torch.get_num_threads()), "device": "cpu"}


class ReferencePort(TwinPort):
    """The reference also runs in float64."""

    dtypes = ("float32", "bfloat16", "float64")


PORT = ReferencePort("reference", "reference", Torch())
