"""numpy arrays in the three dtypes of the harness; bfloat16 is ml_dtypes'."""

from __future__ import annotations

import ml_dtypes
import numpy as np

NUMPY_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float64": np.dtype(np.float64),
}


def wide_dtype(dtype: str) -> str:
    """What "in float32" means in a model of ``dtype``: float64 in a float64 model."""
    return "float64" if dtype == "float64" else "float32"


def stored_dtype(array: np.ndarray) -> str:
    """The harness's name for the dtype of ``array``; float32 for integers, which are compared exactly."""
    return next((name for name, dtype in NUMPY_DTYPES.items() if dtype == array.dtype), "float32")


def is_floating(array: np.ndarray) -> bool:
    return array.dtype in NUMPY_DTYPES.values()


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    """A floating ``array`` in ``dtype`` (round to nearest even); integers and booleans as they are."""
    return array.astype(NUMPY_DTYPES[dtype]) if is_floating(array) else array


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """The values that ``array`` has once it is stored in ``dtype``, in float64: every side is given the same input."""
    return cast(array, dtype).astype(np.float64) if is_floating(array) else array
