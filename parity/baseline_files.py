"""Which baseline files a port must have, and which of what stands in them means nothing any more."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from parity.baseline import FUNCTIONS, SECTIONS, Baselines, folded
from parity.cases import CASES
from parity.checks.plan import case_named
from parity.quantities import TEXT_MODEL, TOP_TAPS, VISION_TAPS, layer_quantities
from parity.runner import CORE_CASES
from reference.errors import InputError

EXPECTED = (*CORE_CASES, FUNCTIONS)
"""The files of every port that has baselines: one a core case, and one of the single functions."""


def problems(baselines: Baselines) -> Iterator[str]:
    """One line each, naming the file and the mend: a file too many or too few, a dtype, section or tap that is gone."""
    if not baselines.files:
        return
    for name in EXPECTED:
        if name not in baselines.files:
            yield f"{baselines.folder / name}.json: expected a file for every core case, found none; {baselines.mend}"
    for name, path in baselines.files.items():
        if name not in EXPECTED:
            yield f"{path}: stale, no core case is called {name}; delete it, or {baselines.mend}"
            continue
        try:
            yield from (f"{path}: stale, {what}; {baselines.mend}" for what in stale_parts(baselines, name))
        except InputError as error:
            yield str(error)


def stale_parts(baselines: Baselines, name: str) -> Iterator[str]:
    able = baselines.port.capabilities().dtypes
    _, document = baselines.read(baselines.files[name])
    for dtype, sections in document.items():
        if dtype not in able:
            yield f"the port has no {dtype}"
        for section, taps in sections.items():
            known = known_taps(name, section)
            if known is None:
                yield f"there is nothing called {section}"
                continue
            for tap in taps:
                if tap not in known:
                    yield f"{section} has no tap {tap}"


@cache
def known_taps(name: str, section: str) -> frozenset[str] | None:
    """The taps that a section of a case's file, or a function, can have; None for an unknown one."""
    if name == FUNCTIONS:
        results = {case.function: frozenset(case.results) for case in CASES}
        return results.get(section)
    if section not in SECTIONS.values() or not section:
        return None
    text = case_named(name).text
    layers = range(text.num_hidden_layers)
    taps = {f"{TEXT_MODEL}layers.{i}.{tap}" for i in layers for tap in layer_quantities(text, i)}
    return frozenset(folded(tap) for tap in (*taps, *TOP_TAPS, *VISION_TAPS))
