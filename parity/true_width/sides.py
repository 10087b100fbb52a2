"""One layer on all sides: reference in float32 and float64, and the port, on one copy of its weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from parity.compare import Place
from parity.faults import FaultySession
from parity.ports.mlx import PORT as MLX
from parity.ports.reference import PORT as REFERENCE
from parity.true_width import port_side, reference_side
from parity.true_width.session import LayerSession, Remembered
from parity.true_width.weights import ExpertBank, Reader, layer_arrays
from reference.config import TextConfig


@dataclass
class Run:
    """What a run shares: where weights come from, how many tokens, which port, and who hears of progress.

    ``in_force`` is entered around everything that the port is asked: a known fault, or nothing.
    """

    reader: Reader
    case: str
    tokens: int
    seed: int
    note: Callable[[str], None] = lambda line: None
    in_force: Callable[[], AbstractContextManager] = nullcontext
    experts: dict[int, int] = field(default_factory=dict)

    @property
    def text(self) -> TextConfig:
        return self.reader.source.config.text_config

    def place(self, check: str, isolated: bool = True) -> Place:
        return Place(check, self.case, "float32", seed=self.seed, isolated=isolated)


class LayerSides:
    """One layer on all sides, on one copy of its weights: ``truth`` float64, ``noise`` float32, ``port``."""

    shown = None

    def __init__(self, run: Run, layer: int, begins: tuple[str, ...] = ("",), truth: bool = True) -> None:
        source = run.reader.source
        self.bank = ExpertBank(run.reader, layer)
        shared = layer_arrays(run.reader, layer, begins)
        self.present = frozenset(shared.views)

        def reference(dtype: str) -> LayerSession:
            wide = dtype == "float64"
            built = reference_side.build_layer(run.text, layer, source.expert_format, shared.views, self.bank, wide)
            return LayerSession(REFERENCE, built, source.config, dtype)

        built = port_side.build_layer(run.text, layer, source.expert_format, shared.arrays, self.bank)
        port = LayerSession(MLX, built, source.config, "float32")
        self.port: Any = Remembered(FaultySession(port, run.in_force))
        self.noise = Remembered(reference("float32"))
        self.truth = Remembered(reference("float64")) if truth else None
