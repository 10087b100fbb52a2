"""What a long run costs: seconds between laps, and memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable


class Clock:
    """Seconds between laps, by name; clocks that run at the same time may write into one record."""

    def __init__(self, note: Callable[[str], None], laps: dict[str, float] | None = None) -> None:
        self.note, self.laps = note, {} if laps is None else laps
        self.start = self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = round(now - self.last, 2)
        self.last = now
        self.note(f"{name}: {self.laps[name]} s")

    def total(self) -> float:
        return round(self.last - self.start, 2)


def peak_rss() -> int:
    """The most memory this process has held, in bytes; the kernel counts in KiB on Linux and in bytes on a Mac."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
