"""The known faults, each a small wrong function, in the order of the modules.

The numbers F… are those under which this project collects what real ports got wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parity.faults import Fault, library

Patch = Callable[[Callable, str], Callable]


def rounded_to_bfloat16(package: str, x: Any) -> Any:
    """``x`` squeezed through bfloat16, back in its own dtype."""
    lib = library(package)
    return x.to(lib.bfloat16).to(x.dtype) if package == "reference" else x.astype(lib.bfloat16).astype(x.dtype)


def per_channel(original: Callable, package: str) -> Callable:
    """Heads and channels change places, so that A_log is read by channel."""

    def log_decay(decay_logit, A_log, dt_bias, lower_bound):
        heads, channels = decay_logit.shape[-2:]
        if A_log.shape[0] < channels:
            A_log = library(package).concatenate([A_log, 0 * A_log[:1].repeat(channels - A_log.shape[0])])
        swapped = dt_bias.reshape(heads, channels).swapaxes(0, 1).reshape(-1)
        return original(decay_logit.swapaxes(-1, -2), A_log, swapped, lower_bound).swapaxes(-1, -2)

    return log_decay


def clamped(original: Callable, package: str) -> Callable:
    """The unbounded gate, cut off at the bound."""

    def log_decay(decay_logit, A_log, dt_bias, lower_bound):
        unbounded = original(decay_logit, A_log, dt_bias, None)
        return unbounded if lower_bound is None else library(package).clip(unbounded, lower_bound, 0.0)

    return log_decay


def unbounded(original: Callable, package: str) -> Callable:
    return lambda decay_logit, A_log, dt_bias, lower_bound: original(decay_logit, A_log, dt_bias, None)


def result_in_bfloat16(original: Callable, package: str) -> Callable:
    return lambda *args, **kwargs: rounded_to_bfloat16(package, original(*args, **kwargs))


def logits_in_bfloat16(original: Callable, package: str) -> Callable:
    return lambda logits, activation: original(rounded_to_bfloat16(package, logits), activation)


def scaled_twice(original: Callable, package: str) -> Callable:
    return lambda q: original(q) * q.shape[-1] ** -0.5


def not_scaled(original: Callable, package: str) -> Callable:
    return lambda q: original(q) * q.shape[-1] ** 0.5


def padding_kept(original: Callable, package: str) -> Callable:
    return lambda x, token_mask: x


def taps_reversed(original: Callable, package: str) -> Callable:
    """The kernel turned round in time: the first tap multiplies the current token."""

    def short_conv(x, weight, state):
        flipped = library(package).concatenate([weight[..., i : i + 1] for i in reversed(range(weight.shape[-1]))], -1)
        return original(x, flipped, state)

    return short_conv


def without_blocks(original: Callable, package: str) -> Callable:
    return lambda self, prefix_sum, blocks: original(self, prefix_sum, [])


def masked_with_zero(original: Callable, package: str) -> Callable:
    def limit_to_groups(biased_scores, groups, chosen_groups):
        limited = original(biased_scores, groups, chosen_groups)
        lib = library(package)
        return lib.where(lib.isinf(limited), lib.zeros_like(limited), limited)

    return limit_to_groups


def exchanged(original: Callable, package: str) -> Callable:
    return lambda gate, up, beta, linear_beta: original(up, gate, beta, linear_beta)


def without_linear_bound(original: Callable, package: str) -> Callable:
    return lambda gate, up, beta, linear_beta: original(gate, up, beta, None)


def zero_based(text_config: Any) -> Any:
    """A configuration that says, counted from 1, what the true one would say counted from 0."""
    linear = text_config.linear_attn_config
    shifted = {name: tuple(i + 1 for i in getattr(linear, name)) for name in ("kda_layers", "full_attn_layers")}
    return text_config.model_copy(update={"linear_attn_config": linear.model_copy(update=shifted)})


def layers_from_zero(original: Callable, package: str) -> Callable:
    return lambda self, text_config, *rest: original(self, zero_based(text_config), *rest)


def sections_from_zero(original: Callable, package: str) -> Callable:
    return lambda text_config, *rest: original(zero_based(text_config), *rest)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "F01",
        "kda.gate",
        "A_log is per channel, since its length is the head size",
        "fluent text; layer cosine 0.92 to 0.95",
        {"kda.log_decay": per_channel},
    ),
    Fault(
        "F02",
        "kda.gate",
        "the bounded gate is the softplus gate, clamped from below",
        "silent; layer cosine near 0.9",
        {"kda.log_decay": clamped},
    ),
    Fault(
        "F03",
        "kda.gate",
        "a lost gate_lower_bound means the unbounded softplus gate",
        "logits off by 0.1 and more",
        {"kda.log_decay": unbounded},
    ),
    Fault(
        "F05",
        "kda.gate",
        "bfloat16 is enough for the decay",
        "a state that never forgets: a drift that grows with the context",
        {"kda.log_decay": result_in_bfloat16},
    ),
    Fault(
        "F09",
        "kda.recurrence",
        "zeroed positions are neutral",
        "wrong only in padded batches: σ(0) still writes at half strength, and lets the state decay",
        {"kda.zero_padding": padding_kept},
    ),
    Fault(
        "F23",
        "kda.recurrence",
        "the readout still lacks its 1/√D",
        "outputs smaller by √D; the norm after it hides most",
        {"kda.scaled_query": scaled_twice},
    ),
    Fault("F23b", "kda.recurrence", "q needs no 1/√D", "outputs larger by √D", {"kda.scaled_query": not_scaled}),
    Fault(
        "F28",
        "short_conv",
        "the first tap multiplies the current token",
        "another filter; text decays",
        {"short_conv.short_conv": taps_reversed},
    ),
    Fault(
        "F43",
        "mla.latent",
        "q_a and kv_a norms use the model's epsilon",
        "scale off by up to 35 % where latents are small; invisible at ordinary size",
        numbers={"mla.LATENT_NORM_EPS": 1e-5},
    ),
    Fault(
        "F44",
        "attn_res.output",
        "the last norm reads the prefix sum, without a mix",
        "another next token; text still looks like text",
        {"text.TextModel.output": without_blocks},
    ),
    Fault(
        "F53",
        "router",
        "the model's dtype is enough for router logits",
        "another choice of experts for a few percent of tokens",
        {"moe.routing_scores": logits_in_bfloat16},
    ),
    Fault(
        "F57",
        "router",
        "groups that do not take part are masked with 0",
        "wrong experts where biased scores are negative",
        {"moe.limit_to_groups": masked_with_zero},
    ),
    Fault(
        "F66",
        "activation",
        "u is not bounded",
        "small drift for small inputs, large for big ones",
        {"activation.situ_glu": without_linear_bound},
    ),
    Fault(
        "F66b",
        "activation",
        "gate and up are interchangeable",
        "another function, equal where both inputs are equal",
        {"activation.situ_glu": exchanged},
    ),
    Fault(
        "F59",
        "layer_kinds",
        "the layer lists count from 0",
        "the model does not load, or loads layers of the wrong kind",
        {"text.DecoderLayer.__init__": layers_from_zero, "weight_table.layer_sections": sections_from_zero},
    ),
)
