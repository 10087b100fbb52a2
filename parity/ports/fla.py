"""fla-core's plain PyTorch functions for KDA as a port under test: the recurrence, the chunked form, both gates.

Whole layers of fla-core need a GPU; what is asked here is the mathematics alone, by the people who wrote the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from parity.ports.reference import Torch
from parity.protocol import Capabilities, Unsupported


class Fla:
    """Functions only; there is no model to open."""

    name, library = "fla", Torch()

    def capabilities(self) -> Capabilities:
        functions = frozenset({"kda.recurrent_kda", "kda_chunk.chunked_kda", "kda.log_decay"})
        return Capabilities(("float32", "bfloat16"), runs=(), kinds=(), functions=functions)

    def versions(self) -> dict[str, str]:
        return self.library.versions() | {"fla-core": version("fla-core")}

    def tensor_names(self, config: Mapping[str, Any], expert_format: str) -> set[str]:
        raise Unsupported("fla-core's functions read no checkpoint")

    def open(self, checkpoint: Path, dtype: str):
        raise Unsupported("fla-core is asked for functions only")

    def call(
        self, function: str, arrays: Mapping[str, np.ndarray | None], settings: Mapping[str, Any]
    ) -> tuple[np.ndarray, ...]:
        given = {name: None if value is None else self.library.to_array(value) for name, value in arrays.items()}
        with self.library.computing():
            results = {"kda.log_decay": gate}.get(function, delta_rule)(**given, **settings)
        return tuple(self.library.to_numpy(result) for result in results)


def gate(decay_logit: Any, A_log: Any, dt_bias: Any, lower_bound: float | None) -> tuple[Any]:
    """Its gates take ``A_log`` of one value a head; K3's padding is cut off."""
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate

    A_log = A_log[: decay_logit.shape[-2]]
    if lower_bound is None:
        return (naive_kda_gate(decay_logit, A_log, dt_bias),)
    return (naive_kda_lowerbound_gate(decay_logit, A_log, dt_bias, lower_bound),)


def delta_rule(
    q: Any, k: Any, v: Any, log_decay: Any, beta: Any, state: Any, chunk_size: int | None = None
) -> tuple[Any, Any]:
    """q comes scaled. Its chunked form takes whole chunks: tokens of zeros, which change nothing, fill the last one."""
    from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda
    from torch.nn.functional import pad

    more = {"scale": 1.0, "initial_state": state, "output_final_state": True}
    if chunk_size is None:
        return naive_recurrent_kda(q, k, v, log_decay, beta, **more)
    tokens = q.shape[1]
    missing = -tokens % chunk_size
    wide = (pad(x, (0, 0, 0, 0, 0, missing)) for x in (q, k, v, log_decay))
    o, state = naive_chunk_kda(*wide, pad(beta, (0, 0, 0, missing)), chunk_size=chunk_size, **more)
    return o[:, :tokens], state


PORT = Fla()
