"""How alike two answers to one question are, looking at one module's quantities only.

Zero is the same answer; arrays differ by their relative RMS, choices and words by the share that differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from parity.cases import CASES
from parity.metrics import relative_rms
from parity.protocol import Taps
from parity.quantities import quantity
from parity.recording import TRACE, Asked
from parity.routing import INDICES, MARGIN
from reference.config import K3Config, TextConfig

FARTHEST = 10.0
"""No two answers are further apart than this: an overflow must not outweigh everything else."""
WHOLE = {"kda": "kda.", "mla": "mla."}
"""Modules that some ports show as a whole only."""


def within(module: str, part: str) -> bool:
    """Whether ``part`` is the module, or a part of one that is shown as a whole."""
    return part == module or (module in WHOLE and part.startswith(WHOLE[module]))


def differences(question: Asked, left: Any, right: Any, module: str) -> Iterator[tuple[str, float]]:
    """(quantity, distance of ``left`` from ``right``) for each quantity of ``module`` in these two answers."""
    if isinstance(left, BaseException) or isinstance(right, BaseException):
        if concerns(question, module):
            yield (
                question.method,
                0.0 if isinstance(left, BaseException) and isinstance(right, BaseException) else FARTHEST,
            )
    elif question.method == "call":
        case = function_case(question.arguments[0])
        if case is not None and within(module, case.module):
            for name, a, b in zip(case.results, left, right, strict=True):
                yield f"{case.function}.{name}", distance(a, b)
    elif question.method in ("module", "vision", "multimodal", TRACE):
        yield from tap_differences(text_config(question.session[0]), left, right, module)
    elif question.method == "run":
        for step, (a, b) in enumerate(zip(left, right, strict=True)):
            for name, value in tap_differences(text_config(question.session[0]), a, b, module):
                yield f"{step}/{name}", value
    elif question.method in OWN_MODULE and concerns(question, module):
        yield from plain_differences(question.method, left, right)


OWN_MODULE = {"picture": "image_processor", "chat": "chat", "tokenize": "tokenizer", "tensor_names": ""}
"""The module that each of these questions is about; names of tensors may be about any."""


def concerns(question: Asked, module: str) -> bool:
    own = OWN_MODULE.get(question.method, "")
    return own in ("", module)


def tap_differences(text: TextConfig, left: Taps, right: Taps, module: str) -> Iterator[tuple[str, float]]:
    for name in left:
        if name not in right or name.endswith(MARGIN):
            continue
        try:
            part = quantity(text, name.rpartition("/")[2]).module
        except KeyError:
            continue
        if within(module, part):
            yield (
                name,
                chosen_differently(left[name], right[name])
                if name.endswith(INDICES)
                else distance(left[name], right[name]),
            )


def plain_differences(method: str, left: Any, right: Any) -> Iterator[tuple[str, float]]:
    if isinstance(left, Mapping):
        for name in left:
            if isinstance(left[name], np.ndarray):
                yield name, distance(left[name], right[name])
            else:
                yield name, float(left[name] != right[name])
    elif isinstance(left, set):
        yield method, len(left ^ right) / max(1, len(left | right))
    elif method == "tokenize":
        yield method, float(list(left) != list(right))
    else:
        yield method, float([tuple(item) for item in left] != [tuple(item) for item in right])


def distance(left: np.ndarray, right: np.ndarray) -> float:
    """Relative RMS, at most FARTHEST; what is not a number on both sides is alike there."""
    if left.shape != right.shape:
        return FARTHEST
    with np.errstate(invalid="ignore"):
        left, right = left.astype(np.float64), right.astype(np.float64)
    both = ~np.isfinite(left) & ~np.isfinite(right)
    if both.any():
        left, right = np.where(both, 0.0, left), np.where(both, 0.0, right)
    return min(FARTHEST, relative_rms(left, right))


def chosen_differently(left: np.ndarray, right: np.ndarray) -> float:
    """The share of tokens with other experts."""
    if left.shape != right.shape:
        return FARTHEST
    return float((np.sort(left, axis=-1) != np.sort(right, axis=-1)).any(axis=-1).mean())


@cache
def function_case(function: str):
    return next((case for case in CASES if case.function == function), None)


@cache
def text_config(checkpoint: Path) -> TextConfig:
    return K3Config.from_file(checkpoint).text_config
