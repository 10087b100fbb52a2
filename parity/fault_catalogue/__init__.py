"""The known faults, each a small wrong function, in the order of the modules.

The numbers F… are those under which this project collects what real ports got wrong; a letter marks a further reading
of the same kind.
"""

from __future__ import annotations

from parity.fault_catalogue import attention, experts, kda, loading, pictures, pixels, residuals, words
from parity.faults import Fault

FAULTS: tuple[Fault, ...] = (
    *kda.FAULTS,
    *attention.FAULTS,
    *residuals.FAULTS,
    *experts.FAULTS,
    *loading.FAULTS,
    *pictures.FAULTS,
    *pixels.FAULTS,
    *words.FAULTS,
)

__all__ = ["FAULTS"]
