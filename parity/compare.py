"""Isolated comparison: one module, the same input on every side, each tap against the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from parity.arrays import stored_dtype
from parity.findings import Finding, measure
from parity.metrics import relative_rms
from parity.protocol import ModuleCall, Taps, Unsupported
from parity.quantities import Quantity, computed_order, inputs_agree, quantity, shows
from parity.routing import INDICES, MARGIN, SCORES, Choice, compare_choice, same_choices, scores_at_ties
from parity.sides import Sides
from parity.tolerance import ISOLATED
from reference.config import TextConfig
from reference.errors import InputError

NOT_COMPARED = (MARGIN,)
"""The margin only says which tokens are tied; as a difference of near numbers it has no relative error."""


class Place(NamedTuple):
    """Where a comparison stands: the fields that all its findings share."""

    check: str
    case: str
    dtype: str
    regime: str = "natural"
    seed: int = 0
    isolated: bool = True

    def finding(self, what: Quantity, tap: str, status: str, **fields) -> Finding:
        return Finding(**self._asdict(), module=what.module, section=what.section, tap=tap, status=status, **fields)


def crash_note(error: Exception) -> str:
    """One line about an exception that a port raised."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def guarded(place: Place, what: Quantity, tap: str, compute: Callable[[], Taps]) -> tuple[Taps | None, Finding | None]:
    """Run a port's computation; what it cannot do is "unsupported", what it does wrong by raising is "error"."""
    try:
        return compute(), None
    except Unsupported as reason:
        return None, place.finding(what, tap, "unsupported", note=str(reason))
    except InputError as error:
        return None, place.finding(what, tap, "fail", note=f"refuses good input: {error}", inputs_agree=True)
    except Exception as error:  # a port under test may fail in any way; the run goes on and says so
        return None, place.finding(what, tap, "error", note=crash_note(error), inputs_agree=True)


def isolated_findings(
    place: Place, sides: Sides, text: TextConfig, call: ModuleCall, want: tuple[str, ...] = ()
) -> Iterator[Finding]:
    """Run ``call`` on the three sides and judge every tap of ``want`` (the taps that truth gives, if empty).

    A failing tap whose own inputs agree is the source; one that is computed from a wrong tap is marked as such.
    """
    truth = sides.truth.module(call)
    names = sorted(want or truth, key=lambda tap: computed_order(text, tap))
    first = quantity(text, names[0])
    found, problem = guarded(place, first, names[0], lambda: sides.port.module(call))
    if found is None:
        yield problem
        return
    noise, shown = sides.noise.module(call), sides.shown
    choice = None
    indices = next((name for name in truth if name.endswith(INDICES)), None)
    if indices and indices in found:
        choice = compare_choice(found[indices], truth, noise, indices)
        call = replace(call, imposed=truth[indices])
        if not same_choices(truth, noise):
            noise = sides.noise.module(call)
        if not same_choices(truth, found):
            found, problem = guarded(place, quantity(text, indices), indices, lambda: sides.port.module(call))
            if found is None:
                yield choice_finding(place, quantity(text, indices), indices, choice)
                yield problem
                return
    wrong: list[str] = []
    for name in names:
        if name.endswith(NOT_COMPARED):
            continue
        what = quantity(text, name)
        if name == indices and choice is not None:
            finding = choice_finding(place, what, name, choice)
        else:
            tied = choice if choice and name.endswith(SCORES) else None
            finding = value_finding(place, what, name, found, truth, noise, tied, shown)
        yield finding.model_copy(update={"inputs_agree": inputs_agree(text, name, wrong)})
        wrong += [name] if finding.status == "fail" else []


def choice_finding(place: Place, what: Quantity, name: str, choice: Choice) -> Finding:
    ties = len(choice.tied)
    if not len(choice.wrong):
        return place.finding(what, name, "pass", error=0.0, allowed=0.0, ties=ties)
    token = int(choice.wrong[0])
    note = (
        f"{len(choice.wrong)} tokens with other experts, first token {token} with margin {choice.margin[token]:.3g} "
        f"where ties end at {choice.threshold:.3g}"
    )
    return place.finding(what, name, "fail", error=float("inf"), allowed=0.0, ties=ties, note=note)


def missing_finding(place: Place, what: Quantity, name: str, shown: frozenset[str] | None) -> Finding:
    """A tap that the port did not give: a failure if it declares it, else unsupported; ``name`` may have a run."""
    if shows(shown, name.rpartition("/")[2]):
        return place.finding(what, name, "fail", note="the port does not show this tap")
    return place.finding(what, name, "unsupported", note="this port does not show this tap, and declares so")


def value_finding(
    place: Place,
    what: Quantity,
    name: str,
    found: Taps,
    truth: Taps,
    noise: Taps,
    tied: Choice | None = None,
    shown: frozenset[str] | None = None,
) -> Finding:
    """``tied`` is given for router scores: what the router chose, and where another mask is as right."""
    if name not in found:
        return missing_finding(place, what, name, shown)
    port, near, true = found[name], noise[name], np.asarray(truth[name])
    if tied is not None and port.shape == true.shape:
        port, near = (scores_at_ties(side, true, tied.forgiven) for side in (port, near))
    noise_error = relative_rms(near, true)
    allowed = ISOLATED[what.module].allowed(place.dtype, noise_error, stored_dtype(near))
    result = measure(port, true)
    status = "pass" if result["error"] <= allowed else "fail"
    return place.finding(what, name, status, allowed=allowed, noise=noise_error, **result)
