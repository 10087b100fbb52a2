"""The checks by name. Each takes a Plan and yields Findings; the suite and the command line run the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from parity.checks import (
    baselines,
    chat,
    converter,
    coverage,
    decode,
    end_to_end,
    golden,
    layers,
    modules,
    multimodal,
    padding,
    processor,
    records,
    tokenizer,
    twins,
    vision,
)
from parity.checks.plan import Plan
from parity.findings import Finding

CHECKS: dict[str, Callable[[Plan], Iterator[Finding]]] = {
    "coverage": coverage.run,
    "twins": twins.run,
    "baselines": baselines.run,
    "anchor": golden.anchor,
    "golden": golden.run,
    "modules": modules.run,
    "layers": layers.run,
    "end_to_end": end_to_end.run,
    "decode": decode.run,
    "padding": padding.run,
    "vision": vision.run,
    "multimodal": multimodal.run,
    "records": records.run,
    "processor": processor.run,
    "chat": chat.run,
    "tokenizer": tokenizer.run,
    "converter": converter.run,
}
PARTS: dict[str, tuple[str, ...]] = {
    "text": (
        "coverage",
        "twins",
        "baselines",
        "anchor",
        "golden",
        "modules",
        "layers",
        "end_to_end",
        "decode",
        "padding",
    ),  # fmt: skip
    "vision": ("coverage", "golden", "vision"),
    "multimodal": ("golden", "multimodal"),
    "processor": ("records", "processor"),
    "chat": ("records", "chat", "tokenizer"),
    "converter": ("converter",),
}
"""What belongs to which part of the model."""

__all__ = ["CHECKS", "Plan"]
