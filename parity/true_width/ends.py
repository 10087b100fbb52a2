"""The two ends of the text tower without its layers: embedding rows, the last mix and norm, the head by pieces."""

from __future__ import annotations

from typing import Any

import numpy as np

from parity.ports.mlx import PORT as MLX
from parity.ports.reference import PORT as REFERENCE
from parity.ports.twin import TwinSession
from parity.protocol import ModuleCall
from parity.true_width.reference_side import load, widened
from parity.true_width.session import Position, ends_session
from parity.true_width.sides import Run
from parity.true_width.source import top_specs
from parity.true_width.weights import SharedArrays
from reference.checkpoint import TensorSpec

HEAD_ROWS = 1 << 13
"""Rows of lm_head in memory at once: 235 MB in float32 at K3's width."""


class Ends:
    """Embedding and last norm of one side; the embedding holds the rows of ``ids`` alone."""

    def __init__(self, session: TwinSession, ids: np.ndarray) -> None:
        self.session, self.ids = session, np.unique(ids)

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """ids [B, T] -> [B, T, hidden]."""
        call = ModuleCall("embed", None, {"input_ids": np.searchsorted(self.ids, ids)})
        return next(iter(self.session.module(call).values()))

    def output(self, position: Position) -> np.ndarray:
        """What lm_head reads, [B, T, hidden]."""
        return next(iter(self.session.module(ModuleCall("output", None, position._asdict())).values()))


def ends_of(run: Run, ids: np.ndarray, truth: bool) -> dict[str, Ends]:
    """The ends on every side, on one copy of their weights. "noise" is the reference in float32, "truth" in float64."""
    source, rows = run.reader.source, np.unique(ids)
    specs = top_specs(source.config)
    embedding = specs.pop("model.embed_tokens.weight")
    del specs["lm_head.weight"]
    shared = SharedArrays(run.reader, {name.removeprefix("model."): spec for name, spec in specs.items()})
    table = embedding_rows(run, embedding, rows)
    sides = {"noise": reference_ends(run, shared.views, table, "float32"), "port": port_ends(run, shared.arrays, table)}
    if truth:
        sides["truth"] = reference_ends(run, shared.views, table, "float64")
    return {name: Ends(session, rows) for name, session in sides.items()}


def embedding_rows(run: Run, spec: TensorSpec, rows: np.ndarray) -> np.ndarray:
    """The rows ``rows`` of the embedding, float32 [n, hidden]."""
    return np.concatenate([run.reader.stored(spec, slice(int(row), int(row) + 1)) for row in rows]).astype(np.float32)


def small_text(run: Run, rows: int) -> Any:
    """The configuration of a tower without layers and with ``rows`` ids."""
    return run.text.model_copy(update={"num_hidden_layers": 0, "vocab_size": rows})


def reference_ends(run: Run, views: dict[str, np.ndarray], table: np.ndarray, dtype: str) -> TwinSession:
    import torch

    from reference.text import TextModel

    with torch.device("meta"):
        model = TextModel(small_text(run, len(table)), run.reader.source.expert_format)
    load(model, views | {"embed_tokens.weight": table})
    model = widened(model) if dtype == "float64" else model
    return ends_session(REFERENCE, model.eval(), run.reader.source.config, dtype)


def port_ends(run: Run, arrays: dict[str, Any], table: np.ndarray) -> TwinSession:
    from port.text import TextModel
    from port.weights import to_mlx

    model = TextModel(small_text(run, len(table)), run.reader.source.expert_format)
    model.load_weights([*arrays.items(), ("embed_tokens.weight", to_mlx(table))], strict=True)
    return ends_session(MLX, model.eval(), run.reader.source.config, "float32")


def head(run: Run, hidden: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The logits [B, T, vocab] of every side from what its head reads."""
    import torch

    from port.linear import Linear as PortLinear
    from reference.linear import Linear as ReferenceLinear

    spec = top_specs(run.reader.source.config)["lm_head.weight"]
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in hidden}
    for first in range(0, spec.shape[0], HEAD_ROWS):
        rows = slice(first, min(first + HEAD_ROWS, spec.shape[0]))
        shared = SharedArrays(run.reader, {"weight": spec}, rows)
        for name, given in hidden.items():
            if name == "port":
                linear: Any = PortLinear(0, 0)
                linear.weight = shared.arrays["weight"]
                port, dtype = MLX, "float32"
            else:
                with torch.device("meta"):
                    linear = ReferenceLinear(spec.shape[1], rows.stop - rows.start)
                load(linear, shared.views)
                port, dtype = REFERENCE, "float64" if name == "truth" else "float32"
                linear = linear.double() if name == "truth" else linear
            session = ends_session(port, linear, run.reader.source.config, dtype)
            session.model.language_model.lm_head = linear
            pieces[name].append(session.module(ModuleCall("lm_head", None, {"hidden": given}))["logits"])
    return {name: np.concatenate(parts, axis=-1) for name, parts in pieces.items()}
