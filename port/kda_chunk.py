"""Kimi Delta Attention over whole chunks of tokens: K3.md §4's recurrence as matrix products (UT transform).

Within a chunk of C tokens let G_i be the log-decays summed over the chunk's tokens up to and including i, S the state
before the chunk. The delta rule's writes U and the outputs O are

    A_ij = beta_i  sum_d k_id k_jd exp(G_id - G_jd)   (j < i)      U = (I + A)^-1 diag(beta) (V - (K exp G) S)
    P_ij =         sum_d q_id k_jd exp(G_id - G_jd)   (j <= i)     O = (Q exp G) S + P U
                                                                   S <- diag(exp G_C) S + (K exp(G_C - G))^T U

exp(-G) is never formed (it overflows after a few strong decays) and no two running sums are ever subtracted (that
loses digits). Instead a chunk is a binary tree of segments. Every token knows its log-decay from its segment's start
and to its segment's end, each summed where it stands; where two neighbours meet,
exp(G_i - G_j) = exp(start of the second .. i) * exp(j .. end of the first), so one matrix product gives the pairs
across the middle. Every exponent is a sum of log-decays, hence <= 0.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from port.linear import wide

# Chunks, over all rows and heads, between two evaluations of the lazy graph, so that memory does not grow with T.
CHUNKS_AT_ONCE = 64


class Segments(NamedTuple):
    """M segments of L tokens each, side by side in every chunk.

    q, k             [..., M, L, Dk]
    from_start       [..., M, L, Dk]  log-decay from the segment's start up to and including the token's
    to_end           [..., M, L, Dk]  log-decay after the token's up to the segment's end
    key_products     [..., M, L, L]   key i with key j < i, times exp(log-decay after j up to and including i); else 0
    query_products   [..., M, L, L]   query i with key j <= i, likewise
    """

    q: mx.array
    k: mx.array
    from_start: mx.array
    to_end: mx.array
    key_products: mx.array
    query_products: mx.array


def single_tokens(q: mx.array, k: mx.array, log_decay: mx.array) -> Segments:
    """Segments of one token: [..., C, Dk] each. No decay lies between a token's write and its own read."""
    own = mx.sum(q * k, axis=-1)[..., None, None]
    q, k, log_decay = (x[..., None, :] for x in (q, k, log_decay))
    return Segments(q, k, log_decay, mx.zeros_like(log_decay), mx.zeros_like(own), own)


def halves(x: mx.array) -> tuple[mx.array, mx.array]:
    """[..., M, L, n] -> every first and every second of two neighbours, [..., M/2, L, n] each."""
    x = x.reshape(*x.shape[:-3], -1, 2, *x.shape[-2:])
    return x[..., 0, :, :], x[..., 1, :, :]


def merge_neighbours(segments: Segments) -> Segments:
    """M segments of L tokens -> M/2 segments of 2L tokens."""
    first, later = (Segments(*parts) for parts in zip(*map(halves, segments), strict=True))
    keys = (first.k * mx.exp(first.to_end)).swapaxes(-1, -2)
    across_keys = (later.k * mx.exp(later.from_start)) @ keys
    across_queries = (later.q * mx.exp(later.from_start)) @ keys
    first_decay, later_decay = first.from_start[..., -1:, :], later.from_start[..., -1:, :]
    return Segments(
        q=mx.concatenate([first.q, later.q], axis=-2),
        k=mx.concatenate([first.k, later.k], axis=-2),
        from_start=mx.concatenate([first.from_start, first_decay + later.from_start], axis=-2),
        to_end=mx.concatenate([first.to_end + later_decay, later.to_end], axis=-2),
        key_products=_lower(first.key_products, across_keys, later.key_products),
        query_products=_lower(first.query_products, across_queries, later.query_products),
    )


def write_operator(key_products: mx.array, beta: mx.array) -> mx.array:
    """(I + A)^-1 diag(beta) by halves; A is beta_i * key_products_ij.

    key_products [..., C, C] strictly lower triangular, beta [..., C] -> [..., C, C].
    """
    return _unit_lower_inverse(beta[..., None] * key_products) * beta[..., None, :]


def into_chunks(x: mx.array, size: int) -> mx.array:
    """[B, T, H, D] -> [n, B, H, C, D]; the last chunk is filled with zeros, which neither decay, write nor read."""
    batch, tokens, heads, width = x.shape
    x = mx.pad(x, [(0, 0), (0, -tokens % size), (0, 0), (0, 0)])
    return x.reshape(batch, -1, size, heads, width).transpose(1, 0, 3, 2, 4)


def out_of_chunks(x: mx.array, tokens: int) -> mx.array:
    """[n, B, H, C, D] -> [B, T, H, D]: the inverse of into_chunks."""
    _, batch, heads, _, width = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, -1, heads, width)[:, :tokens]


def chunked_kda(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
    chunk_size: int = 64,
) -> tuple[mx.array, mx.array]:
    """The same function as ``recurrent_kda``, same arguments, same results, in float32.

    ``chunk_size`` >= 1 is rounded up to a power of two, and down to what T can fill.
    """
    batch, tokens, heads, _ = k.shape
    size = 1 << (min(chunk_size, tokens) - 1).bit_length()
    stride = size * max(1, CHUNKS_AT_ONCE // (batch * heads))
    operands = [wide(x) for x in (q, k, v, log_decay, beta[..., None])]
    state, outputs = wide(state), []
    for start in range(0, tokens, stride):
        part = [x[:, start : start + stride] for x in operands]
        o, state = some_chunks(*(into_chunks(x, size) for x in part), state)
        outputs.append(out_of_chunks(o, part[0].shape[1]))
        if tokens > stride:
            mx.eval(state, outputs[-1])
    return mx.concatenate(outputs, axis=1), state


def some_chunks(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Chunks [n, B, H, C, D] one after another: (o [n, B, H, C, D_v], the state after the last); beta [..., C, 1]."""
    segments = single_tokens(q, k, log_decay)
    while segments.k.shape[-3] > 1:
        segments = merge_neighbours(segments)
    from_start, to_end, key_products, query_products = (x[..., 0, :, :] for x in segments[2:])
    write = write_operator(key_products, beta[..., 0])
    queries, readers, keys = q * mx.exp(from_start), k * mx.exp(from_start), (k * mx.exp(to_end)).swapaxes(-1, -2)
    decay = mx.exp(from_start[..., -1, :])[..., None]
    outputs = []
    for n in range(len(q)):
        writes = write[n] @ (v[n] - readers[n] @ state)
        outputs.append(queries[n] @ state + query_products[n] @ writes)
        state = decay[n] * state + keys[n] @ writes
    return mx.stack(outputs), state


def _lower(first: mx.array, across: mx.array, later: mx.array) -> mx.array:
    """[[first, 0], [across, later]] of [..., L, L] blocks: [..., 2L, 2L]."""
    upper = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
    return mx.concatenate([upper, mx.concatenate([across, later], axis=-1)], axis=-2)


def _unit_lower_inverse(strict: mx.array) -> mx.array:
    """(I + strict)^-1 of strictly lower triangular [..., C, C], C a power of two.

    [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]: as stable as substitution, and all halves of a level at
    once. Never by repeated squaring, which cancels when keys are alike. MLX's own triangular solver runs on CPUs only.
    """
    half = strict.shape[-1] // 2
    if half == 0:
        return mx.ones_like(strict)
    both = mx.stack([strict[..., :half, :half], strict[..., half:, half:]], axis=-3)
    first, later = (x[..., 0, :, :] for x in mx.split(_unit_lower_inverse(both), 2, axis=-3))
    return _lower(first, -(later @ strict[..., half:, :half] @ first), later)
