"""Faults of Kimi Delta Attention: gate, convolution, recurrence, output, and what decoding carries (K3.md §4, §11)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parity.fault_catalogue.patches import (
    Patch,
    around,
    cast_like,
    given,
    instead,
    result,
    rounded_to_bfloat16,
)
from parity.faults import Fault, library

CHUNK = 32


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


def bias_by_channel_first(original: Callable, package: str) -> Callable:
    def log_decay(decay_logit, A_log, dt_bias, lower_bound):
        heads, channels = decay_logit.shape[-2:]
        swapped = dt_bias.reshape(channels, heads).swapaxes(0, 1).reshape(-1)
        return original(decay_logit, A_log, swapped, lower_bound)

    return log_decay


def first_head_for_all(g: Any, package: str) -> Any:
    return g[..., :1, :] + 0 * g


def rate_outside(package: str, decay_logit, A_log, dt_bias, lower_bound) -> Any:
    """exp(A_log) multiplies the sigmoid instead of its argument."""
    lib, (heads, channels) = library(package), decay_logit.shape[-2:]
    gate = lib.sigmoid(decay_logit + dt_bias.reshape(heads, channels))
    return -lib.exp(A_log[:heads])[:, None] * gate * (1.0 if lower_bound is None else -lower_bound)


def taps_reversed(weight: Any) -> Any:
    """The kernel turned round in time: the first tap multiplies the current token."""
    return stacked_last([weight[..., i] for i in reversed(range(weight.shape[-1]))])


def stacked_last(parts: list[Any]) -> Any:
    from parity.fault_catalogue.patches import stacked

    return stacked(parts, -1)


def without_silu(package: str, x, weight, state) -> Any:
    inputs = library(package).concatenate([state, x], 1)
    tokens, taps = x.shape[1], range(weight.shape[-1])
    return cast_like(sum(inputs[:, i : i + tokens] * weight[:, 0, i] for i in taps), x, package)


def a_token_late(original: Callable, package: str, x, weight, state) -> Any:
    """The window ends before the current token."""
    if not state.shape[1]:
        return original(x, weight, state)
    inputs = library(package).concatenate([0 * state[:, :1], state, x], 1)
    window = state.shape[1]
    return original(inputs[:, window:-1], weight, inputs[:, :window])


def one_slot_for_three(original: Callable, package: str, self, x, cache, lengths) -> Any:
    results = original(self, x, cache, lengths)
    cache.conv_k = cache.conv_v = cache.conv_q
    return results


def mean_square(x_unit: Any, package: str) -> Any:
    return x_unit * x_unit.shape[-1] ** 0.5


def epsilon_outside(package: str, x) -> Any:
    length = library(package).sqrt((x * x).sum(-1))[..., None]
    return x / (length + 1e-6)


def recurrence(step: Callable) -> dict[str, Patch]:
    """Both forms of the recurrence by a wrong ``step(q, k, v, decay, beta, S) -> (o, S)`` of one token."""

    def wrong(package: str, q, k, v, log_decay, beta, state, chunk_size=None):
        lib, outputs = library(package), []
        for t in range(q.shape[1]):
            o, state = step(q[:, t], k[:, t], v[:, t], lib.exp(log_decay[:, t])[..., None], beta[:, t], state)
            outputs.append(o)
        return lib.stack(outputs, 1), state

    return {"kda.recurrent_kda": instead(wrong), "kda_chunk.chunked_kda": instead(wrong)}


def both_forms(patch: Patch) -> dict[str, Patch]:
    return {"kda.recurrent_kda": patch, "kda_chunk.chunked_kda": patch}


def read(x: Any, S: Any) -> Any:
    """xᵀ S of every head: [B, H, D_k], [B, H, D_k, D_v] -> [B, H, D_v]."""
    return (x[..., None] * S).sum(-2)


def write(k: Any, value: Any, beta: Any) -> Any:
    return beta[..., None, None] * k[..., None] * value[..., None, :]


def plain_linear_attention(q, k, v, decay, beta, S):
    S = decay * S + write(k, v, beta)
    return read(q, S), S


def read_before_write(q, k, v, decay, beta, S):
    S = decay * S
    return read(q, S), S + write(k, v - read(k, S), beta)


def decay_after_write(q, k, v, decay, beta, S):
    S = decay * (S + write(k, v - read(k, S), beta))
    return read(q, S), S


def error_before_decay(q, k, v, decay, beta, S):
    error = v - read(k, S)
    S = decay * S + write(k, error, beta)
    return read(q, S), S


def strength_on_the_value_alone(q, k, v, decay, beta, S):
    S = decay * S
    S = S + k[..., None] * (beta[..., None] * v - read(k, S))[..., None, :]
    return read(q, S), S


def state_in_bfloat16(pair: Any, package: str) -> Any:
    o, state = pair
    return o, rounded_to_bfloat16(state, package)


def single_tokens_forget(original: Callable, package: str, q, k, v, log_decay, beta, state, *rest) -> Any:
    return original(q, k, v, log_decay, beta, state if q.shape[1] > 1 else 0 * state, *rest)


def single_tokens_twice(original: Callable, package: str, q, k, v, log_decay, beta, state, *rest) -> Any:
    if q.shape[1] == 1:
        _, state = original(q, k, v, log_decay, beta, state, *rest)
    return original(q, k, v, log_decay, beta, state, *rest)


def inverse_by_squaring(package: str, key_products, beta) -> Any:
    """(I + A)⁻¹ as (I − A)(I + A²)(I + A⁴)…: exact algebra that cancels where keys are alike."""
    lib, size = library(package), key_products.shape[-1]
    power = -beta[..., None] * key_products
    inverse, length = lib.eye(size) + power, 1
    while length < size:
        power = power @ power
        inverse, length = inverse + inverse @ power, 2 * length
    return inverse * beta[..., None, :]


def decay_split_in_two(package: str, q, k, v, log_decay, beta, state, chunk_size=CHUNK) -> Any:
    """exp(G_i − G_j) as exp(G_i) · exp(−G_j), whose second factor overflows."""
    lib, outputs = library(package), []
    q, k, v, log_decay = (x.swapaxes(1, 2) for x in (q, k, v, log_decay))
    beta = beta.swapaxes(1, 2)[..., None]
    for start in range(0, q.shape[2], CHUNK):
        Q, K, V, g, b = (x[:, :, start : start + CHUNK] for x in (q, k, v, log_decay, beta))
        G = lib.cumsum(g, 2)
        grown = K * lib.exp(-G)
        A = b * lib.tril((K * lib.exp(G)) @ grown.swapaxes(-1, -2), -1)
        rows: list[Any] = []
        for i, right_side in enumerate(_rows(b * (V - (K * lib.exp(G)) @ state))):
            rows.append(right_side - sum((A[:, :, i, j, None] * rows[j] for j in range(i)), 0 * right_side))
        U = lib.stack(rows, 2)
        P = lib.tril((Q * lib.exp(G)) @ grown.swapaxes(-1, -2))
        outputs.append((Q * lib.exp(G)) @ state + P @ U)
        last = G[:, :, -1:]
        state = lib.exp(last).swapaxes(-1, -2) * state + (K * lib.exp(last - G)).swapaxes(-1, -2) @ U
    return lib.concatenate(outputs, 2).swapaxes(1, 2), state


def _rows(x: Any) -> list[Any]:
    return [x[:, :, i] for i in range(x.shape[2])]


def last_token_fills_the_chunk(original: Callable, package: str, *arguments) -> Any:
    """The tail of the last chunk holds the last token again, and the state goes on through it."""
    *tokens, state, chunk_size = arguments
    length = tokens[0].shape[1]
    filled = [library(package).concatenate([x, *[x[:, -1:]] * (-length % CHUNK)], 1) for x in tokens]
    o, state = original(*filled, state, chunk_size)
    return o[:, :length], state


def silu_gate(original: Callable, package: str, o, weight, gate_logit, eps) -> Any:
    return original(o, weight, gate_logit, eps) * gate_logit


def norm_over_all_heads(original: Callable, package: str, o, weight, gate_logit, eps) -> Any:
    lib, square = library(package), o * o
    own = lib.sqrt(square.mean(-1) + eps)[..., None]
    joint = lib.sqrt(square.mean(-1).mean(-1) + eps)[..., None, None]
    return original(o, weight, gate_logit, eps) * cast_like(own / joint, gate_logit, package)


def gate_before_norm(package: str, o, weight, gate_logit, eps) -> Any:
    lib = library(package)
    gated = o * lib.sigmoid(gate_logit)
    return cast_like(gated * lib.rsqrt((gated * gated).mean(-1)[..., None] + eps) * weight, gate_logit, package)


def mask_forgotten_while_decoding(original: Callable, package: str, self, x, token_mask=None, cache=None) -> Any:
    """KDA's padding mask is only used while the cache is empty."""
    fresh = cache is None or not bool((cache.conv_q != 0).any())
    return original(self, x, token_mask if fresh else None, cache)


def lengths_of_the_batch(original: Callable, package: str, x, state, lengths) -> Any:
    return original(x, state, 0 * lengths + x.shape[1])


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
        {"kda.log_decay": given(lower_bound=None)},
    ),
    Fault(
        "F05",
        "kda.gate",
        "bfloat16 is enough for the decay",
        "a state that never forgets: a drift that grows with the context",
        {"kda.log_decay": result(rounded_to_bfloat16)},
    ),
    Fault(
        "F05b",
        "kda.gate",
        "bfloat16 is enough for the write strength",
        "a small drift",
        {"kda.write_strength": result(rounded_to_bfloat16)},
    ),
    Fault(
        "F06",
        "kda.gate",
        "the write strength reaches up to 2, as where negative eigenvalues are allowed",
        "states of the wrong size",
        {"kda.write_strength": result(lambda beta, package: 2 * beta)},
    ),
    Fault(
        "F07",
        "kda.gate",
        "the recurrence takes the decay as a factor, not as a logarithm",
        "states that grow without bound",
        {"kda.log_decay": result(lambda g, package: library(package).exp(g))},
    ),
    Fault(
        "F08",
        "kda.gate",
        "the gate has no bias of its own: dt_bias is for the discretization of other models",
        "decays of the wrong strength",
        {"kda.log_decay": given(dt_bias=lambda bias: 0 * bias)},
    ),
    Fault(
        "F08b",
        "kda.gate",
        "dt_bias is laid out channel first",
        "decays at the wrong channels; nothing where all biases are alike",
        {"kda.log_decay": bias_by_channel_first},
    ),
    Fault(
        "F08c",
        "kda.gate",
        "exp(A_log) scales the gate from outside the sigmoid",
        "decays below the bound",
        {"kda.log_decay": instead(rate_outside)},
    ),
    Fault(
        "F08d",
        "kda.gate",
        "A_log is the logarithm of a time, so the rate is exp(−A_log)",
        "slow heads are fast and the other way round",
        {"kda.log_decay": given(A_log=lambda A_log: -A_log)},
    ),
    Fault(
        "F20",
        "kda.gate",
        "one head's gate serves all heads",
        "every head forgets at the same pace",
        {"kda.log_decay": result(first_head_for_all)},
    ),
    Fault(
        "F28",
        "short_conv",
        "the first tap multiplies the current token",
        "another filter; text decays",
        {"short_conv.short_conv": given(weight=taps_reversed)},
    ),
    Fault(
        "F28b",
        "short_conv",
        "the convolution has no activation",
        "q, k and v of the wrong sign",
        {"short_conv.short_conv": instead(without_silu)},
    ),
    Fault(
        "F28c",
        "short_conv",
        "the window ends before the current token",
        "everything a token late",
        {"short_conv.short_conv": around(a_token_late)},
    ),
    Fault(
        "F28d",
        "short_conv",
        "the three convolutions share one slot in the cache",
        "prefill right, decoding wrong",
        {"kda.KimiDeltaAttention.convolutions": around(one_slot_for_three)},
    ),
    Fault(
        "F29",
        "short_conv",
        "the convolution's window is not kept between calls",
        "prefill right, the first tokens of every later call wrong",
        {"short_conv.next_conv_state": result(lambda state, package: 0 * state)},
    ),
    Fault(
        "F28e",
        "short_conv",
        "every row's window ends where the batch ends",
        "wrong after right padding only",
        {"short_conv.next_conv_state": around(lengths_of_the_batch)},
    ),
    Fault(
        "F09",
        "kda.recurrence",
        "zeroed positions are neutral",
        "wrong only in padded batches: σ(0) still writes at half strength, and lets the state decay",
        {"kda.zero_padding": lambda original, package: lambda x, token_mask: x},
        also=("short_conv",),
    ),
    Fault(
        "F35",
        "kda.recurrence",
        "the padding mask is only needed while the cache is empty",
        "wrong where left padding is longer than a prefill chunk",
        {"kda.KimiDeltaAttention.forward": around(mask_forgotten_while_decoding)},
        also=("short_conv",),
    ),
    Fault(
        "F10",
        "kda.recurrence",
        "the inverse within a chunk may be computed by repeated squaring",
        "right on random keys; uncorrelated where neighbouring keys are alike and decay is slow",
        {"kda_chunk.write_operator": instead(inverse_by_squaring)},
    ),
    Fault(
        "F13",
        "kda.recurrence",
        "the decay between two tokens is a quotient of two cumulative decays",
        "infinite where decay is strong over a chunk",
        {"kda_chunk.chunked_kda": instead(decay_split_in_two)},
    ),
    Fault(
        "F19",
        "kda.recurrence",
        "what fills the last chunk does not matter",
        "a wrong state after every length that is not a multiple of the chunk",
        {"kda_chunk.chunked_kda": around(last_token_fills_the_chunk)},
    ),
    Fault(
        "F21",
        "kda.recurrence",
        "the epsilon of the key's norm is added outside the root",
        "only keys of tiny length",
        {"kda.l2_normalize": instead(epsilon_outside)},
    ),
    Fault(
        "F21b",
        "kda.recurrence",
        "the epsilon of the key's norm is PyTorch's 1e-12",
        "only keys of tiny length",
        numbers={"kda.L2_EPS": 1e-12},
    ),
    Fault(
        "F22",
        "kda.recurrence",
        "keys are normalized to a mean square of 1",
        "the state grows to infinity in a few tokens",
        {"kda.l2_normalize": result(mean_square)},
    ),
    Fault(
        "F23",
        "kda.recurrence",
        "the readout still lacks its 1/√D",
        "outputs smaller by √D; the norm after it hides most",
        {"kda.scaled_query": result(lambda q, package: q * q.shape[-1] ** -0.5)},
    ),
    Fault(
        "F23b",
        "kda.recurrence",
        "q needs no 1/√D",
        "outputs larger by √D; the norm after it hides most",
        {"kda.scaled_query": result(lambda q, package: q * q.shape[-1] ** 0.5)},
    ),
    Fault(
        "F24",
        "kda.recurrence",
        "linear attention adds; nothing is overwritten",
        "the state keeps every value ever written under a key",
        recurrence(plain_linear_attention),
    ),
    Fault(
        "F24b",
        "kda.recurrence",
        "a token reads before it writes",
        "everything a token late",
        recurrence(read_before_write),
    ),
    Fault(
        "F24c",
        "kda.recurrence",
        "the decay comes after the write",
        "what was just written has already decayed",
        recurrence(decay_after_write),
    ),
    Fault(
        "F24d",
        "kda.recurrence",
        "the error is taken from the state before its decay",
        "small where decay is slow",
        recurrence(error_before_decay),
    ),
    Fault(
        "F24e",
        "kda.recurrence",
        "the write strength scales the value alone",
        "the whole of what a key holds is erased at every write",
        recurrence(strength_on_the_value_alone),
    ),
    Fault(
        "F26",
        "kda.recurrence",
        "the state may be kept in bfloat16",
        "a drift that grows with the context",
        both_forms(result(state_in_bfloat16)),
    ),
    Fault(
        "F31",
        "kda.recurrence",
        "feeding a token again does no harm, as with a cache of keys and values",
        "prefill right, the state ahead of the text while decoding",
        both_forms(around(single_tokens_twice)),
    ),
    Fault(
        "F33",
        "kda.recurrence",
        "a call with one token starts a sequence",
        "decoding has no memory",
        both_forms(around(single_tokens_forget)),
    ),
    Fault(
        "F34",
        "kda.output",
        "the output gate is a SiLU",
        "outputs of the wrong size and sign",
        {"kda.gated_output_norm": around(silu_gate)},
    ),
    Fault(
        "F34b",
        "kda.output",
        "the output norm goes over all heads together",
        "loud heads drown the others",
        {"kda.gated_output_norm": around(norm_over_all_heads)},
    ),
    Fault(
        "F34c",
        "kda.output",
        "the gate comes before the norm",
        "channels weigh differently",
        {"kda.gated_output_norm": instead(gate_before_norm)},
    ),
    Fault(
        "F34d",
        "kda.output",
        "the output norm has the epsilon of the latent norms",
        "only outputs of tiny size",
        {"kda.gated_output_norm": given(eps=1e-6)},
    ),
)
