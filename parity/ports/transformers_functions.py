"""Single functions of transformers' Kimi-Linear, by this project's names; each is the package's own code."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

from parity.protocol import Unsupported


def code() -> Any:
    return importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")


def rms_norm(x: Any, weight: Any, eps: float) -> tuple[Any]:
    return (_with(code().KimiLinearRMSNorm(x.shape[-1], eps), weight=weight)(x),)


def gated_output_norm(o: Any, gate_logit: Any, weight: Any, eps: float) -> tuple[Any]:
    return (_with(code().KimiLinearRMSNormGated(o.shape[-1], eps), weight=weight)(o, gate_logit),)


def l2_normalize(x: Any) -> tuple[Any]:
    """The package widens q and k before it normalizes them."""
    return (code().l2norm(x.float()).to(x.dtype),)


def log_decay(decay_logit: Any, A_log: Any, dt_bias: Any, lower_bound: float | None) -> tuple[Any]:
    """The forget gate after its projections; ``A_log`` without K3's padding."""
    import torch

    if lower_bound is not None:
        raise Unsupported("transformers' Kimi-Linear has no lower bound")
    batch, tokens, heads, width = decay_logit.shape
    shape = SimpleNamespace(hidden_size=width, linear_head_dim=width, linear_num_heads=heads)
    gate = _with(code().KimiLinearForgetGate(shape), A_log=A_log[:heads].reshape(1, 1, heads, 1), dt_bias=dt_bias)
    gate.f_a_proj = gate.f_b_proj = torch.nn.Identity()
    return (gate(decay_logit.reshape(batch, tokens, heads * width)),)


def recurrent_kda(q: Any, k: Any, v: Any, log_decay: Any, beta: Any, state: Any) -> tuple[Any, Any]:
    return _delta_rule(code().recurrent_kimi_delta_attention, q, k, v, log_decay, beta, state)


def chunked_kda(q: Any, k: Any, v: Any, log_decay: Any, beta: Any, state: Any, chunk_size: int) -> tuple[Any, Any]:
    return _delta_rule(code().chunk_kimi_delta_attention, q, k, v, log_decay, beta, state, chunk_size=chunk_size)


def _delta_rule(function: Any, q: Any, k: Any, v: Any, log_decay: Any, beta: Any, state: Any, **more: Any) -> tuple:
    """The package scales q inside, so what is scaled already is given larger by that factor."""
    given = {"g": log_decay, "beta": beta, "initial_state": state, "output_final_state": True, **more}
    return inspect.unwrap(function)(q * q.shape[-1] ** 0.5, k, v, **given)


def _with(module: Any, **parameters: Any) -> Any:
    import torch

    for name, value in parameters.items():
        setattr(module, name, torch.nn.Parameter(value))
    return module.eval()


FUNCTIONS = {
    "norm.rms_norm": rms_norm,
    "kda.gated_output_norm": gated_output_norm,
    "kda.l2_normalize": l2_normalize,
    "kda.log_decay": log_decay,
    "kda.recurrent_kda": recurrent_kda,
    "kda_chunk.chunked_kda": chunked_kda,
}
