"""The chunked form of the KDA recurrence, by matrix products, safe in every regime (K3.md §4.5).

Within a chunk of C tokens, with G the running sum of the log-decay:

    A[i, j] = β_i Σ_d k_i k_j exp(G_i − G_j)  for j < i          P[i, j] = Σ_d q_i k_j exp(G_i − G_j)  for j ≤ i
    U = (I + A)⁻¹ β (V − (K ∘ exp G) S)                            O = (Q ∘ exp G) S + P U
    S' = diag(exp G_C) S + (K ∘ exp(G_C − G))ᵀ U

No exponent is ever positive: exp(−G) overflows under strong decay. A and P are built by halves: in a segment split at
its middle, the rows of the second half meet the columns of the first through the middle,
exp(G_i − G_j) = exp(G_i − G_mid) · exp(G_mid − G_j), both factors at most 1, both exponents summed where they stand and
never as the difference of two long sums. The inverse of I + A grows by the same halves.
"""

from __future__ import annotations

import mlx.core as mx

from port.linear import wide

EVALUATE_EVERY = 16
"""Chunks after which the lazy graph is computed, so that it does not grow with T."""


def power_of_two_from(n: int) -> int:
    """The least power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()


def into_chunks(x: mx.array, chunk: int) -> mx.array:
    """x [B, T, H, D] -> [B, H, n, chunk, D]; T is filled up with zeros, which are steps that do nothing."""
    batch, tokens, heads, dim = x.shape
    x = mx.pad(x, [(0, 0), (0, -tokens % chunk), (0, 0), (0, 0)])
    return x.reshape(batch, -1, chunk, heads, dim).transpose(0, 3, 1, 2, 4)


def out_of_chunks(x: mx.array, tokens: int) -> mx.array:
    """The inverse of ``into_chunks``: [B, H, n, chunk, D] -> [B, tokens, H, D]."""
    batch, heads, _, _, dim = x.shape
    return x.transpose(0, 2, 3, 1, 4).reshape(batch, -1, heads, dim)[:, :tokens]


def halves(x: mx.array, length: int) -> tuple[mx.array, mx.array]:
    """x [..., C, D] cut into segments of 2·length: (first halves, second halves), each [..., C/(2·length), length, D]."""
    x = x.reshape(*x.shape[:-2], -1, 2, length, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def joined(first: mx.array, second: mx.array) -> mx.array:
    """The inverse of ``halves``: back to [..., C, D]."""
    x = mx.stack([first, second], axis=-3)
    return x.reshape(*x.shape[:-4], -1, x.shape[-1])


def widen_sums(prefix: mx.array, suffix: mx.array, length: int) -> tuple[mx.array, mx.array]:
    """Local running sums over segments of ``length`` -> those over segments of twice the length.

    prefix[i] sums the segment up to and with i, suffix[j] sums it after j; both [..., C, D].
    """
    prefix_1, prefix_2 = halves(prefix, length)
    suffix_1, suffix_2 = halves(suffix, length)
    total_1, total_2 = prefix_1[..., -1:, :], prefix_2[..., -1:, :]
    return joined(prefix_1, prefix_2 + total_1), joined(suffix_1 + total_2, suffix_2)


def across_middle(left: mx.array, right: mx.array, prefix: mx.array, suffix: mx.array, length: int) -> mx.array:
    """``Σ_d left_i right_j exp(G_i − G_j)`` for i in the second and j in the first half of every segment.

    left, right and the local sums [..., C, D] -> [..., C/(2·length), length, length].
    """
    _, rows = halves(left * mx.exp(prefix), length)
    columns, _ = halves(right * mx.exp(suffix), length)
    return rows @ columns.swapaxes(-1, -2)


def quartered(diagonal: mx.array, lower_left: mx.array) -> mx.array:
    """Lower-triangular blocks, pairwise with what stands below: [..., 2m, h, h] and [..., m, h, h] -> [..., m, 2h, 2h]."""
    h = diagonal.shape[-1]
    diagonal = diagonal.reshape(*lower_left.shape[:-2], 2, h, h)
    first, second = diagonal[..., 0, :, :], diagonal[..., 1, :, :]
    upper = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
    return mx.concatenate([upper, mx.concatenate([lower_left, second], axis=-1)], axis=-2)


def below_inverse(inverse: mx.array, lower_left: mx.array) -> mx.array:
    """``−B⁻¹ C A⁻¹``, the lower left of the inverse of [[A, 0], [C, B]]; shapes as in ``quartered``."""
    h = inverse.shape[-1]
    inverse = inverse.reshape(*lower_left.shape[:-2], 2, h, h)
    return -(inverse[..., 1, :, :] @ lower_left @ inverse[..., 0, :, :])


def within_chunks(
    q: mx.array, k: mx.array, log_decay: mx.array, beta: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """((I + A)⁻¹, P, G, G_C − G) of every chunk, bottom-up from segments of one token.

    q, k, log_decay [..., C, D], beta [..., C, 1], C a power of two -> [..., C, C] twice, [..., C, D] twice.
    """
    chunk = k.shape[-2]
    prefix, suffix = log_decay, mx.zeros_like(log_decay)
    inverse = mx.ones((*k.shape[:-1], 1, 1), k.dtype)
    reads = mx.sum(q * k, axis=-1)[..., None, None]
    length = 1
    while length < chunk:
        inverse = quartered(inverse, below_inverse(inverse, across_middle(beta * k, k, prefix, suffix, length)))
        reads = quartered(reads, across_middle(q, k, prefix, suffix, length))
        prefix, suffix = widen_sums(prefix, suffix, length)
        length *= 2
    return inverse[..., 0, :, :], reads[..., 0, :, :], prefix, suffix


def chunked_kda(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
    chunk_size: int = 64,
) -> tuple[mx.array, mx.array]:
    """The same function as ``recurrent_kda``, same arguments, same results, chunk by chunk, in float32 (§4.5).

    ``chunk_size`` >= 1 is rounded up to a power of two, and down to what T can fill.
    """
    tokens = q.shape[1]
    chunk = min(power_of_two_from(chunk_size), power_of_two_from(tokens))
    operands = (q, k, v, log_decay, beta[..., None])
    q, k, v, log_decay, beta = (into_chunks(wide(x), chunk) for x in operands)
    inverse, reads, prefix, suffix = within_chunks(q, k, log_decay, beta)
    q_decayed, k_decayed, k_remaining = q * mx.exp(prefix), k * mx.exp(prefix), k * mx.exp(suffix)
    whole_decay = mx.exp(prefix[..., -1, :])[..., None]
    state, outputs = wide(state), []
    for n in range(q.shape[2]):
        written = inverse[:, :, n] @ (beta[:, :, n] * (v[:, :, n] - k_decayed[:, :, n] @ state))
        outputs.append(q_decayed[:, :, n] @ state + reads[:, :, n] @ written)
        state = whole_decay[:, :, n] * state + k_remaining[:, :, n].swapaxes(-1, -2) @ written
        if (n + 1) % EVALUATE_EVERY == 0:
            mx.eval(state, outputs[-EVALUATE_EVERY:])
    return out_of_chunks(mx.stack(outputs, axis=2), tokens), state
