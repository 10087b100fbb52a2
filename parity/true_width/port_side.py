"""One layer of the MLX port on weights that others hold, with stacks of the chosen experts alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from reference.checkpoint import LAYERS

if TYPE_CHECKING:
    from parity.true_width.weights import ExpertBank
    from reference.checkpoint import ExpertFormat
    from reference.config import TextConfig


def build_layer(
    text: TextConfig, layer: int, expert_format: ExpertFormat, arrays: dict[str, Any], bank: ExpertBank
) -> Any:
    """The 0-based ``layer`` on ``arrays``, by the port's own table; what these lack stays NaN."""
    import mlx.core as mx

    from port.text import DecoderLayer
    from port.weight_table import layer_sections

    module = DecoderLayer(text, layer, expert_format)
    table = {name: rule for section in layer_sections(text, layer, expert_format) for name, rule in section.items()}
    unknown = sorted(arrays.keys() - table.keys())
    if unknown:
        raise ValueError(f"no parameter of the port: {unknown}")
    weights = [(name, table[name]([array], mx.float32)) for name, array in arrays.items()]
    if module.is_moe:
        experts, numbered = module.block_sparse_moe.experts, "block_sparse_moe.experts.{expert}."
        for part in ("w1", "w2", "w3"):
            begin = f"{numbered}{part}."
            rules = {name.removeprefix(begin): rule for name, rule in table.items() if name.startswith(begin)}
            setattr(experts, part, chosen_linear(getattr(experts, part), part, rules, bank))
    module.load_weights(weights, strict=False)
    return module.eval()


def chosen_linear(whole: Any, part: str, rules: dict[str, Any], bank: ExpertBank) -> Any:
    """In place of ``whole``, the matrices ``part`` of all experts: the port's own linear map over the chosen ones."""
    import mlx.core as mx
    import mlx.nn as nn

    from port.weights import to_mlx

    class ChosenLinear(nn.Module):
        def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
            """x [N, 1 or k, in], chosen [N, k] expert numbers -> [N, k, out]."""
            numbers, places = np.unique(np.array(chosen), return_inverse=True)
            bank.fetch(numbers)
            stack = type(whole)(0, 0, 0)
            for name, rule in rules.items():
                sources = [to_mlx(bank.expert(int(number))[f"{part}.{name}"]) for number in numbers]
                setattr(stack, name, rule(sources, mx.float32))
            y = stack(x, mx.array(places.reshape(chosen.shape).astype(np.int32)))
            mx.eval(y)  # before the stack goes
            return y

    return ChosenLinear()


def name_layer(module: Any, layer: int) -> None:
    """Give the modules of one layer, of either twin, the paths that they have in the whole model."""
    root = f"{LAYERS}{layer}"
    for path, part in module.named_modules():
        part.tap_path = f"{root}.{path}" if path else root
