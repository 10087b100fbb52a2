"""One layer of the reference on weights that others hold: float32 in place, float64 widened as it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from parity.true_width.weights import ExpertBank
    from reference.checkpoint import ExpertFormat
    from reference.config import TextConfig

SMALL = 1 << 23
"""Elements up to which a float64 copy is made at once and kept: all but the large matrices."""


def build_layer(
    text: TextConfig,
    layer: int,
    expert_format: ExpertFormat,
    views: dict[str, np.ndarray],
    bank: ExpertBank,
    wide: bool,
) -> torch.nn.Module:
    """The 0-based ``layer`` on the memory of ``views``; what these lack stays without values and must not be used."""
    import torch

    from reference.text import DecoderLayer

    with torch.device("meta"):
        module = DecoderLayer(text, layer, expert_format)
    if module.is_moe:
        module.block_sparse_moe.experts = lazy_experts(text, expert_format, bank)
    load(module, views)
    return (widened(module) if wide else module).eval()


def load(module: torch.nn.Module, views: dict[str, np.ndarray]) -> None:
    """Give ``module`` the arrays of ``views``, without a copy; they must all be its own."""
    import torch

    state = {name: torch.from_numpy(view) for name, view in views.items()}
    unexpected = module.load_state_dict(state, strict=False, assign=True).unexpected_keys
    if unexpected:
        raise ValueError(f"no parameter of the module: {unexpected}")


def lazy_experts(text: TextConfig, expert_format: ExpertFormat, bank: ExpertBank) -> torch.nn.Module:
    """The reference's own Experts, of which each is made when a token comes to it, and dropped after it."""
    import torch

    from reference.activation import gated_activation
    from reference.moe import Expert, Experts

    class LazyExpert(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            """z [N, latent] -> [N, latent]."""
            with torch.device("meta"):
                expert = Expert(text.latent_size, text.moe_intermediate_size, gated_activation(text), expert_format)
            load(expert, {name: as_used(array, z) for name, array in bank.expert(self.number).items()})
            return expert(z)

    def as_used(array: np.ndarray, z: torch.Tensor) -> np.ndarray:
        if array.dtype == np.uint8:
            return array
        return array.astype(np.float64 if z.dtype == torch.float64 else np.float32)

    experts = Experts(LazyExpert(number) for number in range(text.num_experts))
    experts.register_forward_pre_hook(lambda module, given: bank.fetch(given[1].unique().tolist()))
    return experts


def widened(module: torch.nn.Module) -> torch.nn.Module:
    """``module`` in float64, exactly its float32 values; a large matrix is widened for each product alone."""
    import torch

    from reference.linear import Linear

    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.device.type != "meta" and parameter.numel() <= SMALL:
                setattr(part, name, torch.nn.Parameter(parameter.double(), requires_grad=False))
        if isinstance(part, Linear) and part.weight.numel() > SMALL:
            _widen_when_used(part)
    return module


def _widen_when_used(linear: torch.nn.Module) -> None:
    """During its forward ``linear`` has its weight in float64."""
    import torch

    narrow: Any = linear.weight

    def before(module: torch.nn.Module, given: tuple) -> None:
        module.weight = torch.nn.Parameter(narrow.double(), requires_grad=False)

    def after(module: torch.nn.Module, given: tuple, result: torch.Tensor) -> None:
        module.weight = narrow

    linear.register_forward_pre_hook(before)
    linear.register_forward_hook(after)
