"""Other ways to compute the same functions, as patches of the MLX port: another order of sums, form or grouping.

Nothing here changes the mathematics (K3.md throughout); what a change does is said where it is listed, in benign.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from parity.fault_catalogue.patches import around, cast_like
from parity.faults import library
from reference.taps import tap


def wide(x: Any, package: str) -> Any:
    return x.astype(library(package).float32)


def sigmoid(x: Any, package: str) -> Any:
    return 1 / (1 + library(package).exp(-x))


def backwards(x: Any) -> Any:
    """The last axis the other way round."""
    return x[..., ::-1]


def linear(product: Callable[[Any, Any], Any]):
    """Every linear map by another ``product(x, W)`` in float32, rounded once."""

    def forward(original: Callable, package: str, self: Any, x: Any) -> Any:
        return cast_like(product(wide(x, package), wide(self.weight, package)), x, package)

    return {"linear.Linear.forward": around(forward)}


def in_two_parts(x: Any, W: Any) -> Any:
    half = W.shape[1] // 2
    return x[..., :half] @ W[:, :half].T + x[..., half:] @ W[:, half:].T


def from_the_other_end(x: Any, W: Any) -> Any:
    return backwards(x) @ backwards(W).T


def outputs_in_two_parts(original: Callable, package: str, self: Any, x: Any) -> Any:
    half = self.weight.shape[0] // 2
    return library(package).concatenate([x @ self.weight[:half].T, x @ self.weight[half:].T], -1)


def each_row_alone(original: Callable, package: str, self: Any, x: Any) -> Any:
    return library(package).concatenate([original(self, x[i : i + 1]) for i in range(x.shape[0])], 0)


def norm_by_division(original: Callable, package: str, x: Any, weight: Any, eps: float) -> Any:
    x_wide = wide(x, package)
    root = library(package).sqrt((x_wide * x_wide).mean(-1, keepdims=True) + eps)
    return cast_like(x_wide / root, x, package) * weight


def norm_from_the_other_end(original: Callable, package: str, x: Any, weight: Any, eps: float) -> Any:
    return backwards(original(backwards(x), backwards(weight), eps))


def situ_up_first(original: Callable, package: str, gate, up, beta, linear_beta) -> Any:
    lib, g, u = library(package), wide(gate, package), wide(up, package)
    bounded_up = u if linear_beta is None else linear_beta * lib.tanh(u / linear_beta)
    return cast_like((bounded_up * sigmoid(g, package)) * (beta * lib.tanh(g / beta)), gate, package)


def situ_compiled(original: Callable, package: str, gate, up, beta, linear_beta) -> Any:
    return library(package).compile(lambda g, u: original(g, u, beta, linear_beta))(gate, up)


def newest_tap_first(original: Callable, package: str, x, weight, state) -> Any:
    inputs = wide(library(package).concatenate([state, x], 1), package)
    tokens, taps = x.shape[1], wide(weight, package)[:, 0]
    y = sum(inputs[:, i : i + tokens] * taps[:, i] for i in reversed(range(taps.shape[-1])))
    return cast_like(y * sigmoid(y, package), x, package)


def channels_in_two_groups(original: Callable, package: str, x, weight, state) -> Any:
    half = x.shape[-1] // 2
    halves = [(slice(None, half), slice(half)), (slice(half, None), slice(half, None))]
    return library(package).concatenate([original(x[..., c], weight[w], state[..., c]) for c, w in halves], -1)


def each_head_alone(original: Callable, package: str, q, k, v, log_decay, beta, state, *rest) -> Any:
    parts = []
    for h in range(q.shape[2]):
        own, one = slice(h, h + 1), [x[:, :, h : h + 1] for x in (q, k, v, log_decay, beta)]
        parts.append(original(*one, state[:, own], *rest))
    return join(parts, package, 2, 1)


def each_sequence_alone(original: Callable, package: str, q, k, v, log_decay, beta, state, *rest) -> Any:
    rows = [slice(b, b + 1) for b in range(q.shape[0])]
    return join(
        [original(*(x[r] for x in (q, k, v, log_decay, beta, state)), *rest) for r in rows], package, 0, 0
    )  # fmt: skip


def in_two_calls(original: Callable, package: str, q, k, v, log_decay, beta, state, *rest) -> Any:
    """The state of the first half of the tokens is handed to the second."""
    half, parts = q.shape[1] // 2, []
    for part in (slice(None, half), slice(half, None)) if half else (slice(None),):
        o, state = original(*(x[:, part] for x in (q, k, v, log_decay, beta)), state, *rest)
        parts.append(o)
    return library(package).concatenate(parts, 1), state


def join(parts: Sequence[tuple[Any, Any]], package: str, axis: int, state_axis: int) -> Any:
    outputs, states = zip(*parts, strict=True)
    lib = library(package)
    return lib.concatenate(list(outputs), axis), lib.concatenate(list(states), state_axis)


def token_by_token(original: Callable, package: str, q, k, v, log_decay, beta, state, chunk_size) -> Any:
    return importlib.import_module(f"{package}.kda").recurrent_kda(q, k, v, log_decay, beta, state)


def length_by_division(original: Callable, package: str, x) -> Any:
    x_wide = wide(x, package)
    return cast_like(x_wide / library(package).sqrt((x_wide * x_wide).sum(-1, keepdims=True) + 1e-6), x, package)


def gate_by_exponential(original: Callable, package: str, decay_logit, A_log, dt_bias, lower_bound) -> Any:
    """The sigmoid as 1 / (1 + e⁻ˣ), the rate folded into both summands."""
    if lower_bound is None:
        return original(decay_logit, A_log, dt_bias, lower_bound)
    heads, channels = decay_logit.shape[-2:]
    rate = library(package).exp(wide(A_log, package)[:heads])[:, None]
    bias = wide(dt_bias, package).reshape(heads, channels)
    return lower_bound / (1 + library(package).exp(-(rate * wide(decay_logit, package) + rate * bias)))


def strength_by_exponential(original: Callable, package: str, logits) -> Any:
    return sigmoid(wide(logits, package), package)


def output_norm_by_head(original: Callable, package: str, o, weight, gate_logit, eps) -> Any:
    heads = [slice(h, h + 1) for h in range(o.shape[2])]
    return library(package).concatenate([original(o[:, :, h], weight, gate_logit[:, :, h], eps) for h in heads], 2)


def absorbed(original: Callable, package: str, self: Any, query, cache) -> Any:
    self.form, usual = "absorbed", self.form
    try:
        return original(self, query, cache)
    finally:
        self.form = usual


def softmax_in_steps(original: Callable, package: str, scores, allowed) -> Any:
    """Exponentials of what is below the row's largest, divided by their sum."""
    lib, seen = library(package), allowed[:, None]
    scores = lib.where(seen, wide(scores, package), -lib.inf)
    largest = scores.max(-1, keepdims=True)
    raised = lib.where(seen, lib.exp(scores - lib.where(largest == -lib.inf, 0.0, largest)), 0.0)
    total = raised.sum(-1, keepdims=True)
    return raised / lib.where(total == 0, 1.0, total)


def attention_by_head(original: Callable, package: str, q, k, v, scale, allowed) -> Any:
    heads = [slice(h, h + 1) for h in range(q.shape[2])]
    return library(package).concatenate(
        [original(q[:, :, h], k[:, :, h], v[:, :, h], scale, allowed) for h in heads], 2
    )


def newest_key_first(original: Callable, package: str, q, k, v, scale, allowed) -> Any:
    return original(q, k[:, ::-1], v[:, ::-1], scale, allowed[:, :, ::-1])


def attention_in_float32(original: Callable, package: str, q, k, v, scale, allowed) -> Any:
    return cast_like(original(*(wide(x, package) for x in (q, k, v)), scale, allowed), q, package)


def contiguous(original: Callable, package: str, q, k, v, scale, allowed) -> Any:
    copies = (library(package).contiguous(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v))
    return original(*copies, scale, allowed)


def mix_divided_last(original: Callable, package: str, prefix_sum, blocks, norm_weight, proj_weight, eps) -> Any:
    """Σ eˢ v / Σ eˢ instead of weights that sum to 1."""
    lib = library(package)
    sources = wide(lib.stack([*blocks, prefix_sum]), package)
    unit = sources / lib.sqrt((sources * sources).mean(-1, keepdims=True) + eps)
    scores = (unit * (wide(norm_weight, package) * wide(proj_weight, package)[0])).sum(-1)
    raised = lib.exp(scores - scores.max(0))[..., None]
    return cast_like((raised * sources).sum(0) / raised.sum(0), prefix_sum, package)


def mix_the_other_way(original: Callable, package: str, prefix_sum, blocks, norm_weight, proj_weight, eps) -> Any:
    """The sources in the opposite order; a sum does not care which is called the prefix sum."""
    sources = [*blocks, prefix_sum][::-1]
    return original(sources[-1], sources[:-1], norm_weight, proj_weight, eps)


def last_of_equals(original: Callable, package: str, biased_scores, top_k) -> Any:
    """Among equal scores the last expert is taken, where the port takes the first."""
    chosen = original(backwards(biased_scores), top_k)
    return library(package).sort(biased_scores.shape[-1] - 1 - chosen, axis=-1)


def scaled_before_divided(original: Callable, package: str, scores, indices, renormalize, scaling_factor) -> Any:
    lib = library(package)
    chosen = lib.take_along_axis(wide(scores, package), indices, axis=-1)
    if renormalize and indices.shape[-1] > 1:
        return (scaling_factor * chosen) / (chosen.sum(-1, keepdims=True) + 1e-20)
    return original(scores, indices, renormalize, scaling_factor)


def experts_one_after_another(original: Callable, package: str, self: Any, z, indices, weights) -> Any:
    outputs, total = wide(self.outputs(z, indices), package), 0.0
    for place in reversed(range(indices.shape[-1])):
        total = total + outputs[:, place] * weights[:, place, None]
    return total


def experts_sorted_by_token(original: Callable, package: str, self: Any, z, indices, weights) -> Any:
    """The tokens go through in another order and come back to their places."""
    lib = library(package)
    order = lib.argsort(-indices[:, 0])
    return original(self, z[order], indices[order], weights[order])[lib.argsort(order)]


def each_token_alone(original: Callable, package: str, self: Any, z, indices, weights) -> Any:
    tokens = [slice(t, t + 1) for t in range(len(z))]
    return library(package).concatenate([original(self, z[t], indices[t], weights[t]) for t in tokens])


def weighted_before_down(original: Callable, package: str, self: Any, z, indices, weights) -> Any:
    """w2 is linear: the weight may come before it, if float32 is kept between."""
    z = wide(z, package)[:, None]
    hidden = self.activation(self.w1(z, indices), self.w3(z, indices))
    return self.w2(hidden * weights[..., None], indices).sum(1)


def unpacked(original: Callable, package: str, x, packed, scale, chosen) -> Any:
    """The experts' weights in float32, then plain products."""
    weights = importlib.import_module(f"{package}.mxfp4").unpack(packed, scale)[chosen]
    return cast_like((weights @ wide(x, package)[..., None])[..., 0], x, package)


def heads_of_the_tower_alone(original: Callable, package: str, q, k, v) -> Any:
    heads = [slice(h, h + 1) for h in range(q.shape[1])]
    return library(package).concatenate([original(q[:, h], k[:, h], v[:, h]) for h in heads], -1)


def last_patch_first(original: Callable, package: str, q, k, v) -> Any:
    return original(q, k[::-1], v[::-1])


def gelu_by_sigmoid(original: Callable, package: str, x) -> Any:
    """x · σ(2·√(2/π)·(x + 0.044715 x³)) is the tanh form."""
    values = wide(x, package)
    inner = 0.7978845608028654 * (values + 0.044715 * values * values * values)
    return cast_like(values * sigmoid(2 * inner, package), x, package)


def frames_in_the_other_order(original: Callable, package: str, x) -> Any:
    return original(x[::-1])


def features_in_two_parts(original: Callable, package: str, self: Any, merged) -> Any:
    half = max(1, merged.shape[0] // 2)
    parts = [original(self, merged[part]) for part in (slice(None, half), slice(half, None)) if len(merged[part])]
    result = library(package).concatenate(parts)
    return tap(self, "output", result)


def both_forms(change: Callable) -> dict:
    return {"kda.recurrent_kda": around(change), "kda_chunk.chunked_kda": around(change)}
