"""One layer, or the two ends of the text tower, of either twin, as something that answers module calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from parity.ports.twin import TwinPort, TwinSession
from parity.protocol import ModuleCall, Taps
from parity.recording import answer_of
from parity.true_width.port_side import name_layer
from reference.checkpoint import TEXT
from reference.config import K3Config
from reference.taps import Recorder, name_modules, recording

ROUTER = "router"
"""A kind of call beyond the protocol's: the router alone, so that its own choice is judged where experts lack."""


class Position(NamedTuple):
    """What passes from layer to layer: prefix_sum [B, T, hidden], blocks [n, B, T, hidden]."""

    prefix_sum: np.ndarray
    blocks: np.ndarray


class LayerSession(TwinSession):
    """One layer of a twin, under the paths that it has in the whole model."""

    def __init__(self, port: TwinPort, layer: Any, config: K3Config, dtype: str) -> None:
        name_layer(layer, layer.layer)
        text_model = SimpleNamespace(layers={layer.layer: layer})
        super().__init__(port, SimpleNamespace(language_model=SimpleNamespace(model=text_model)), config, dtype)
        self.layer = layer

    def _call(self, call: ModuleCall, inputs: dict[str, Any]) -> None:
        if call.kind == ROUTER:
            x = inputs["input"]
            self.layer.block_sparse_moe.gate(x.reshape(-1, x.shape[-1]), self.layer)
        else:
            super()._call(call, inputs)

    def residual(self, before: Position) -> Position:
        """What the first half of the layer makes of prefix sum and bank (K3.md §6, steps 1 to 3)."""
        with self.port.library.computing():
            return self._position(*self.layer.add_attention(*self._given(before)))

    def passes(
        self, before: Sequence[Position], imposed: Sequence[np.ndarray] | None = None
    ) -> list[tuple[Position, Taps]]:
        """The whole layer over one piece of the sequence after another, with a cache that begins empty.

        ``imposed`` replaces the router's choice, piece by piece.
        """
        cache = self.port.module("cache")
        kind = cache.KDACache if self.text.is_kda(self.layer.layer) else cache.MLACache
        entry = kind(self.text, before[0].prefix_sum.shape[0], cache.DTYPES[self.dtype])
        results = []
        for number, position in enumerate(before):
            given = {}
            if imposed is not None:
                given[f"{self.layer.tap_path}.router.indices"] = self.port.library.to_array(imposed[number])
            with self.port.library.computing(), recording(Recorder(given)) as recorder:
                prefix_sum, blocks = self._given(position)
                after = self._position(*self.layer(prefix_sum, blocks, None, entry))
                results.append((after, self._taps(recorder)))
        return results

    def _given(self, position: Position) -> tuple[Any, list[Any]]:
        return self._array(position.prefix_sum), [self._array(block) for block in position.blocks]

    def _position(self, prefix_sum: Any, blocks: Sequence[Any]) -> Position:
        to_numpy = self.port.library.to_numpy
        sums = to_numpy(prefix_sum)
        bank = np.stack([to_numpy(block) for block in blocks]) if blocks else np.zeros((0, *sums.shape), sums.dtype)
        return Position(sums, bank)


class Remembered:
    """A session that answers a question that was asked before without computing again."""

    def __init__(self, session: LayerSession) -> None:
        self.session = session
        self._answers: dict[tuple, Any] = {}

    def module(self, call: ModuleCall) -> Taps:
        imposed = None if call.imposed is None else np.asarray(call.imposed).tobytes()
        key = (call.kind, imposed)
        if key not in self._answers:
            self._answers[key] = answer_of(lambda: self.session.module(call))
        answer = self._answers[key]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def residual(self, before: Position) -> Position:
        return self.session.residual(before)


def ends_session(port: TwinPort, text_model: Any, config: K3Config, dtype: str) -> TwinSession:
    """A tower without layers, whose embedding, last mix and head can be asked; the head is set piece by piece."""
    holder = SimpleNamespace(model=text_model, lm_head=None)
    name_modules(text_model)
    for path, part in text_model.named_modules():
        part.tap_path = f"{TEXT}model.{path}" if path else f"{TEXT}model"
    return TwinSession(port, SimpleNamespace(language_model=holder), config, dtype)


def joined(results: Sequence[Mapping[str, np.ndarray]], names: Sequence[str]) -> Taps:
    """The taps ``names`` of the pieces of one sequence, one after the other along the tokens."""
    flat = {name: [np.asarray(taps[name]).reshape(-1, taps[name].shape[-1]) for taps in results] for name in names}
    return {name: np.concatenate(parts) for name, parts in flat.items()}
