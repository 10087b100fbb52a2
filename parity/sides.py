"""The three sides of every comparison: truth (reference, float64), noise (reference, same dtype), port."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np

from parity.protocol import Port, Session, Step, Taps, Unsupported
from parity.routing import router_taps


def reference_port() -> Port:
    from parity.ports.reference import PORT

    return PORT


NOISES = ("noise", "other_noise")
"""The reference's sides in the port's dtype: two right programs whose rounding is drawn independently."""
FORMS = {"noise": {"kda": "chunked", "mla": "plain"}, "other_noise": {"kda": "recurrent", "mla": "absorbed"}}
"""Equal ways to compute, by side; unasked, the reference takes those of "noise"."""


@lru_cache(maxsize=24)
def reference_session(checkpoint: Path, dtype: str) -> Session:
    """The reference on one checkpoint; no port takes part in it, so a process opens it once."""
    return reference_port().open(checkpoint, dtype)


def in_forms_of(side: str, session: Session) -> Session:
    """The same session, from now on computing as ``side`` does."""
    for module, form in FORMS[side].items():
        session.use_form(module, form)
    return session


class Sides:
    """One checkpoint in one dtype, opened on each side when first needed."""

    def __init__(self, port: Port, checkpoint: Path, dtype: str) -> None:
        self.port_under_test, self.checkpoint, self.dtype = port, checkpoint, dtype
        self._port: Session | Exception | None = None
        self._alone: dict[tuple[str, bytes, bool], Taps] = {}

    @property
    def truth(self) -> Session:
        return reference_session(self.checkpoint, "float64")

    @property
    def noise(self) -> Session:
        return in_forms_of("noise", self.in_dtype)

    @property
    def other_noise(self) -> Session:
        """The reference in its other forms: rounding grows along a pass, and one draw of it may be a lucky one.

        It is the session of ``noise``: run it before asking for the other one.
        """
        return in_forms_of("other_noise", self.in_dtype)

    @property
    def in_dtype(self) -> Session:
        """The reference in the port's dtype."""
        return reference_session(self.checkpoint, self.dtype)

    @property
    def port(self) -> Session:
        """The port's session; a port that fails to open fails the same way every time, without trying again."""
        if self._port is None:
            try:
                if self.dtype not in self.port_under_test.capabilities().dtypes:
                    raise Unsupported(f"this port has no {self.dtype}")
                self._port = self.port_under_test.open(self.checkpoint, self.dtype)
            except Exception as error:
                self._port = error
        if isinstance(self._port, Exception):
            raise self._port
        return self._port

    @property
    def shown(self) -> frozenset[str] | None:
        """The taps that the port declares for this checkpoint; None if all of them."""
        return getattr(self.port, "taps", self.port_under_test.capabilities().taps)

    @property
    def two(self) -> tuple[Callable[[], Session], Callable[[], Session]]:
        """The port and the reference in the same dtype, opened when called: what is measured against the truth."""
        return (lambda: self.port), (lambda: self.noise)

    def row_alone(self, side: str, ids: np.ndarray, imposed: bool = False) -> Taps:
        """The taps of one unpadded pass over ids [1, T] on the side "truth" or one of NOISES of the reference, computed
        once; ``imposed``: with the truth's choice of experts."""
        key = (side, ids.tobytes(), imposed)
        if key not in self._alone:
            truth = self.row_alone("truth", ids) if imposed else {}
            routing = [{name: truth[name] for name in router_taps(truth)}]
            self._alone[key] = getattr(self, side).run([Step(input_ids=ids)], routing if imposed else None)[0]
        return self._alone[key]
