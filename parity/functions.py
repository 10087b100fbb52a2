"""Comparison of single functions: the port's, the reference's in the same dtype, and the truth in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from parity.arrays import cast, stored_dtype
from parity.cases import CASES, Drawn, FunctionCase
from parity.compare import Place, guarded
from parity.findings import Finding, measure
from parity.metrics import relative_rms
from parity.protocol import Port
from parity.quantities import Quantity
from parity.sides import reference_port
from parity.tolerance import ISOLATED

TRUTH_OF = {"kda_chunk.chunked_kda": "kda.recurrent_kda"}
"""Where the truth is another form: the chunked function must equal the recurrence."""


class Expected(NamedTuple):
    """The inputs of one regime with the truth's and the reference's own results; no port takes part in them."""

    drawn: Drawn
    truth: tuple[np.ndarray, ...]
    noise: tuple[np.ndarray, ...]


@lru_cache(maxsize=1024)
def expected(case: FunctionCase, regime: str, dtype: str, seed: int) -> Expected:
    """What every port is measured against, computed once in a process."""
    drawn = case.drawn(regime, dtype, seed)
    return Expected(drawn, truth_of(case, drawn), _call(reference_port(), case, drawn, dtype))


def function_findings(port: Port, case: FunctionCase, regime: str, dtype: str, seed: int) -> Iterator[Finding]:
    """One finding per result of ``case.function`` on the inputs of ``regime``."""
    place, what = Place("modules", case.function, dtype, regime, seed), _quantity(case)
    drawn, truth, noise = expected(case, regime, dtype, seed)
    taps, problem = guarded(
        place, what, case.results[0], lambda: dict(zip(case.results, _call(port, case, drawn, dtype), strict=True))
    )
    if taps is None:
        yield problem
        return
    for name, true, near in zip(case.results, truth, noise, strict=True):
        noise_error = relative_rms(near, true)
        allowed = 0.0 if case.exact else _allowed(case.module, noise_error, stored_dtype(near))
        result = measure(taps[name], true)
        status = "pass" if result["error"] <= allowed else "fail"
        yield place.finding(what, name, status, allowed=allowed, noise=noise_error, inputs_agree=True, **result)


def truth_of(case: FunctionCase, drawn: Drawn) -> tuple[np.ndarray, ...]:
    """The float64 reference's results."""
    function = TRUTH_OF.get(case.function, case.function)
    settings = drawn.settings if function == case.function else {}
    return reference_port().call(function, drawn.arrays, settings)


def all_function_findings(port: Port, dtypes: tuple[str, ...], seed: int) -> Iterator[Finding]:
    for case in CASES:
        for dtype in dtypes:
            yield from case_findings(port, case, dtype, seed)


def case_findings(port: Port, case: FunctionCase, dtype: str, seed: int) -> Iterator[Finding]:
    """One function in all its regimes; a port that has no such function, or no such dtype, is told so."""
    able = port.capabilities()
    if case.function not in able.functions or dtype not in able.dtypes:
        place = Place("modules", case.function, dtype, seed=seed)
        yield place.finding(_quantity(case), case.results[0], "unsupported", note="not offered by this port")
        return
    for regime in case.regimes:
        yield from function_findings(port, case, regime, dtype, seed)


def _allowed(module: str, noise: float, stored: str) -> float:
    """A single function is judged by the dtype in which it answers."""
    return ISOLATED[module].allowed(stored, noise, stored)


def _quantity(case: FunctionCase) -> Quantity:
    return Quantity(case.module, case.section, 0)


def _call(port: Port, case: FunctionCase, drawn: Drawn, dtype: str) -> tuple[np.ndarray, ...]:
    arrays = {
        name: None if array is None else cast(array, case.dtype_of(name, dtype)) for name, array in drawn.arrays.items()
    }
    return port.call(case.function, arrays, drawn.settings)
