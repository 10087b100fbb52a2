"""The projector: merged vision tokens to rows of the text tower's width (K3.md §9)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from port.linear import Linear, wide
from port.vision import VisionNorm
from reference.config import VisionConfig
from reference.taps import tap


def gelu_erf(x: mx.array) -> mx.array:
    """GELU in its exact form: ``x · Φ(x) = x/2 · (1 + erf(x/√2))``. The tower's is the tanh form (§9)."""
    values = wide(x)
    return (0.5 * values * (1 + mx.erf(values * 2**-0.5))).astype(x.dtype)


class ExactGELU(nn.Module):
    """The nameless middle of ``proj``; it has no parameters."""

    def __call__(self, x: mx.array) -> mx.array:
        return gelu_erf(x)


class Projector(nn.Module):
    """``post_norm(proj.2 · gelu_erf(proj.0 · x))``, parameters named as below ``mm_projector.`` (§2). Tap: output."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width, hidden = config.merged_width, config.text_hidden_size
        self.proj = [Linear(width, width), ExactGELU(), Linear(width, hidden)]
        self.post_norm = VisionNorm(hidden, config.projector_ln_eps)

    def __call__(self, merged: mx.array) -> mx.array:
        """``merged`` [tokens, kh·kw, dim], as the tower gives it -> [tokens, hidden], model dtype (§9, §16)."""
        x = merged.flatten(1)
        for step in self.proj:
            x = step(x)
        return tap(self, "output", self.post_norm(x))
