"""Numbers as a reader meets them on the page."""

from __future__ import annotations

import math

from parity.findings import Finding


def amount(value: float | None) -> str:
    """An error in two digits: 0.91, 9.5e-7; ∞ for what is no number at all."""
    if value is None:
        return ""
    if math.isnan(value) or math.isinf(value):
        return "∞"
    if value == 0 or 0.01 <= value < 1000:
        return f"{value:.2g}" if value < 100 else f"{value:.0f}"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits}e{int(power)}"


def share(finding: Finding) -> float | None:
    """``error / allowed``: above 1 the limit is passed. None where nothing was measured; an exact thing is 0 or ∞."""
    if finding.error is None:
        return None
    if finding.allowed:
        return finding.error / finding.allowed
    return 0.0 if finding.error == 0 else math.inf


def share_text(value: float | None) -> str:
    """How much of the limit is used: 0.4; ×900 000 when it is passed."""
    if value is None or math.isnan(value):
        return ""
    if value <= 1:
        return "0" if value == 0 else "<.01" if value < 0.01 else f"{value:.2f}".lstrip("0")
    if math.isinf(value):
        return "∞"
    return f"×{value:.1f}" if value < 10 else f"×{value:.0f}" if value < 1000 else f"×{value:.0e}".replace("e+0", "e")


def count(value: int) -> str:
    """1924 -> 1 924, with a thin space that does not break."""
    return f"{value:,}".replace(",", "\u202f")


def number(value: float) -> str:
    """One element: four digits."""
    digits, e, power = f"{value:.4g}".partition("e")
    return f"{digits}e{int(power)}" if e else digits
