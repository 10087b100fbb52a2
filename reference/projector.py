"""The projector: merged vision tokens to rows of the text tower's width (K3.md §9)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from reference.config import VisionConfig
from reference.linear import Linear
from reference.taps import tap
from reference.vision import VisionNorm


def gelu_erf(x: Tensor) -> Tensor:
    """GELU in its exact form: ``x · Φ(x) = x/2 · (1 + erf(x/√2))``. The tower's is the tanh form (§9)."""
    return functional.gelu(x, approximate="none")


class ExactGELU(nn.Module):
    """The nameless middle of ``proj``; it has no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return gelu_erf(x)


class Projector(nn.Module):
    """``post_norm(proj.2 · gelu_erf(proj.0 · x))``, parameters named as below ``mm_projector.`` (§2). Tap: output."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width, hidden = config.merged_width, config.text_hidden_size
        self.proj = nn.Sequential(Linear(width, width), ExactGELU(), Linear(width, hidden))
        self.post_norm = VisionNorm(hidden, config.projector_ln_eps)

    def forward(self, merged: Tensor) -> Tensor:
        """``merged`` [tokens, kh·kw, dim], as the tower gives it -> [tokens, hidden], model dtype (§9, §16)."""
        return tap(self, "output", self.post_norm(self.proj(merged.flatten(1))))
