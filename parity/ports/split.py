"""The MLX port split over ranks, as a port under test: ``pipeline:…`` in one process, ``ring:…`` in one each.

What follows the colon says how: ``2`` even stages, ``cut=3,7`` stages cut before these layers, ``experts=2`` the
experts of every layer shared out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parity.ports.loopback import Ranks
from parity.ports.mlx import PORT as MLX
from parity.ports.mlx import MlxPort
from parity.ports.twin import TwinSession
from parity.protocol import TEXT_KINDS, Capabilities, ModuleCall, Step, Taps, Unsupported
from reference.config import K3Config
from reference.errors import InputError

MOST_RANKS = 64
RUNS = ("prefill", "decode", "padded")
FORM = "a number of ranks, cut=LAYER,LAYER… in order, or experts=RANKS"


class Split(NamedTuple):
    """How a model is split: ``ranks``; ``cuts`` before layers, None for even stages; or its ``experts``."""

    ranks: int
    cuts: tuple[int, ...] | None = None
    experts: bool = False

    @classmethod
    def parsed(cls, text: str) -> Split:
        """What follows the colon of a port's name; InputError if it is no split."""
        kind, _, numbers = text.rpartition("=")
        try:
            values = tuple(int(number) for number in numbers.split(","))
        except ValueError:
            values = ()
        split = cls(len(values) + 1, values) if kind == "cut" else cls(values[0] if values else 0, None, bool(kind))
        known = kind in ("", "cut", "experts") and values and (kind == "cut" or len(values) == 1)
        if not known or not 1 <= split.ranks <= MOST_RANKS or min(values) < 0 or list(values) != sorted(values):
            raise InputError("--port", "split", f"{FORM}, at most {MOST_RANKS} ranks", text, "correct it")
        return split

    def check(self, checkpoint: Path) -> None:
        """Raise Unsupported where a checkpoint has too few layers or experts to be split so."""
        text = K3Config.from_file(checkpoint).text_config
        if self.cuts and self.cuts[-1] > text.num_hidden_layers:
            raise Unsupported(f"{text.num_hidden_layers} layers cannot be cut before layer {self.cuts[-1]}")
        if self.experts and self.ranks > text.num_experts:
            raise Unsupported(f"{text.num_experts} experts cannot be shared out to {self.ranks} ranks")

    def __str__(self) -> str:
        if self.cuts is not None:
            return f"cut={','.join(map(str, self.cuts))}"
        return f"experts={self.ranks}" if self.experts else str(self.ranks)


class RankSession(TwinSession):
    """One rank's model, asked like any other; ``read`` are the tensors it has read."""

    def __init__(self, split: Split, checkpoint: Path, dtype: str, transport: Any) -> None:
        from port.expert_split import load_share
        from port.pipeline import load_stage

        self.split = split
        if split.experts:
            model, self.read = load_share(checkpoint, dtype, transport)
        else:
            model = load_stage(checkpoint, dtype, transport, split.cuts)
            self.read = model.read
        super().__init__(MLX, model, K3Config.from_file(checkpoint / "config.json"), dtype)

    def new_cache(self, batch: int) -> Any:
        return super().new_cache(batch) if self.split.experts else self.model.new_cache(batch, self.dtype)

    def answers(self, call: ModuleCall) -> bool:
        """Whether this rank holds the module; with split experts every rank does."""
        if self.split.experts:
            return True
        if call.layer is not None:
            return call.layer in self.model.layers
        return self.model.first if call.kind == "embed" else self.model.last


class SplitSession:
    """All ranks of a model in this process."""

    def __init__(self, split: Split, checkpoint: Path, dtype: str) -> None:
        self.split, self.ranks = split, Ranks(split.ranks)
        self.sessions = self.ranks.each(lambda rank: RankSession(split, checkpoint, dtype, self.ranks.ends[rank]))

    def run(self, steps: Sequence[Step], imposed: Sequence[Mapping[str, np.ndarray]] | None = None) -> list[Taps]:
        return merged(self.split, self.ranks.each(lambda rank: self.sessions[rank].run(steps, imposed)))

    def module(self, call: ModuleCall) -> Taps:
        if call.kind not in TEXT_KINDS:
            raise Unsupported(f"{call.kind}: the text tower alone is split")

        def asked(rank: int) -> list[Taps]:
            session = self.sessions[rank]
            return [session.module(call) if session.answers(call) else {}]

        return merged(self.split, self.ranks.each(asked))[0]

    def vision(self, *given: Any, **more: Any) -> Taps:
        raise Unsupported("the text tower alone is split")

    multimodal = use_form = vision


def merged(split: Split, answers: Sequence[Sequence[Taps]]) -> list[Taps]:
    """The taps of all ranks together, step by step; RuntimeError if two stages ran one module.

    Ranks that share the experts of one model compute all else alike: where they differ in one bit, there is no answer.
    """
    together: list[Taps] = [dict(taps) for taps in answers[0]]
    for rank, steps in enumerate(answers[1:], 1):
        for step, taps in zip(together, steps, strict=True):
            for name, array in taps.items():
                if name in step and not split.experts:
                    raise RuntimeError(f"{name} was computed twice, the second time on rank {rank}")
                step[name] = agreed(step[name], array) if name in step else array
    return together


def agreed(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """What two ranks gave; NaN, or an expert -1, where they do not agree."""
    same = (left == right) | ((left != left) & (right != right))
    return left if same.all() else np.where(same, left, np.array(-1 if left.dtype.kind == "i" else np.nan, left.dtype))


class SplitPort(MlxPort):
    """The MLX port on several ranks; functions are those of the whole port, and are not asked again."""

    converted = False

    def __init__(self, text: str, kind: str = "pipeline") -> None:
        self.split = Split.parsed(text)
        super().__init__(f"{kind}:{text}", "port", MLX.library)

    def capabilities(self) -> Capabilities:
        return Capabilities(self.dtypes, RUNS, TEXT_KINDS)

    def versions(self) -> dict[str, str]:
        return super().versions() | {"split": f"{self.split}, {self.split.ranks} ranks"}

    def call(self, function: str, arrays: Any, settings: Any) -> tuple[np.ndarray, ...]:
        raise Unsupported(function)

    def open(self, checkpoint: Path, dtype: str) -> SplitSession:
        self.split.check(checkpoint)
        return SplitSession(self.split, checkpoint, dtype)
