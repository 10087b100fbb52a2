"""Kimi Delta Attention over whole chunks of tokens: K3.md §4's recurrence as matrix products (UT transform).

Within a chunk of C tokens let G_i be the log-decays summed over the chunk's tokens up to and including i, S the state
before the chunk. The delta rule's writes U and the outputs O are

    A_ij = β_i  Σ_d k_id k_jd exp(G_id − G_jd)   (j < i)      U = (I + A)⁻¹ diag(β) (V − (K exp G) S)
    P_ij =      Σ_d q_id k_jd exp(G_id − G_jd)   (j ≤ i)      O = (Q exp G) S + P U
                                                              S ← diag(exp G_C) S + (K exp(G_C − G))ᵀ U

exp(−G) is never formed (it overflows after a few strong decays) and no two running sums are ever subtracted (that
loses digits). Instead a chunk is a binary tree of segments. Every token knows its log-decay from its segment's start
and to its segment's end, each summed where it stands; where two neighbours meet,
exp(G_i − G_j) = exp(start of the second … i) · exp(j … end of the first), so one matrix product gives the pairs across
the middle. Every exponent is a sum of log-decays, hence ≤ 0.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from port.linear import wide
from reference.errors import InputError

# So many chunks (of all heads together) lie between two evaluations of the lazy graph: memory does not grow with T.
CHUNKS_AT_ONCE = 64


def tree_size(chunk_size: int, tokens: int) -> int:
    """The chunk length in use: the power of two at or above ``chunk_size``, or above the whole input if less."""
    return 1 << (min(chunk_size, tokens) - 1).bit_length()


def into_chunks(x: mx.array, size: int) -> mx.array:
    """[B, T, H, D] -> [n, B, H, size, D].

    If need be, the last chunk is filled with zeros: a step with k = 0, β = 0 and log-decay 0 changes nothing.
    """
    batch, tokens, heads, width = x.shape
    x = mx.pad(x, [(0, 0), (0, -tokens % size), (0, 0), (0, 0)])
    return x.reshape(batch, -1, size, heads, width).transpose(1, 0, 3, 2, 4)


def decayed_products(
    readers: mx.array, keys: mx.array, log_decay: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Σ_d r_id k_jd exp(G_id − G_jd) for all pairs j < i of each chunk, by the tree of halves, levels 1, 2, … C/2.

    readers [..., R, C, D] (R vectors of each token that read the state after its decay: its key, its query), keys and
    log_decay [..., C, D] -> products [..., R, C, C], zero where j ≥ i; what meets the states at the chunk's two ends,
    readers · exp(G) and keys · exp(G_C − G); and exp(G_C) [..., D].
    """
    size, length = keys.shape[-2], 1
    from_start, to_end = log_decay, mx.zeros_like(log_decay)
    products = mx.zeros((*readers.shape[:-1], 1, 1))
    while length < size:
        _, second_readers = _halves(readers * mx.exp(from_start)[..., None, :, :], length)
        first_keys, _ = _halves(keys * mx.exp(to_end), length)
        across = second_readers @ first_keys[..., None, :, :, :].swapaxes(-1, -2)
        products = _lower(products[..., 0::2, :, :], across, products[..., 1::2, :, :])
        from_start, to_end = _widened(from_start, to_end, length)
        length *= 2
    readers, keys = readers * mx.exp(from_start)[..., None, :, :], keys * mx.exp(to_end)
    return products[..., 0, :, :], readers, keys, mx.exp(from_start[..., -1, :])


def write_operator(key_products: mx.array, beta: mx.array) -> mx.array:
    """(I + A)⁻¹ diag(β), A = diag(β) · key_products.

    key_products [..., C, C], strictly lower triangular, beta [..., C] -> [..., C, C]. Powers of A (repeated squaring)
    would give the same in exact arithmetic, but cancel to nothing where neighbouring keys are alike.
    """
    return _unit_lower_inverse(beta[..., None] * key_products) * beta[..., None, :]


class ChunkTerms(NamedTuple):
    """What chunks contribute before any state is known; in each, the first three axes are [n, B, H].

    readers  [.., 2, C, D_k]  K exp(G), then Q exp(G): what meets the state before the chunk
    M        [.., C, C]       (I + A)⁻¹ diag(β)
    P        [.., C, C]
    keys     [.., D_k, C]     (K exp(G_C − G))ᵀ
    decay    [.., D_k, 1]     exp(G_C)
    """

    readers: mx.array
    M: mx.array
    P: mx.array
    keys: mx.array
    decay: mx.array


def within_chunks(q: mx.array, k: mx.array, log_decay: mx.array, beta: mx.array) -> ChunkTerms:
    """The terms of n chunks at once. q, k, log_decay [n, B, H, C, D_k], beta [n, B, H, C, 1]."""
    products, readers, keys, decay = decayed_products(mx.stack([k, q], axis=-3), k, log_decay)
    M = write_operator(products[..., 0, :, :], beta[..., 0])
    P = products[..., 1, :, :] + mx.sum(q * k, axis=-1)[..., None] * mx.eye(k.shape[-2])
    return ChunkTerms(readers, M, P, keys.swapaxes(-1, -2), decay[..., None])


def pass_over_chunks(terms: ChunkTerms, v: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    """Carry the state [B, H, D_k, D_v] through n chunks: (o [n, B, H, C, D_v], the state after the last).

    v [n, B, H, C, D_v]. The only sequential part.
    """
    outputs = []
    for readers, M, P, keys, decay, V in zip(*terms, v, strict=True):
        expected, read = readers[..., 0, :, :] @ state, readers[..., 1, :, :] @ state
        U = M @ (V - expected)
        outputs.append(read + P @ U)
        state = decay * state + keys @ U
    return mx.stack(outputs), state


def chunked_kda(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
    chunk_size: int = 64,
) -> tuple[mx.array, mx.array]:
    """The same function as ``recurrent_kda``, chunk by chunk (K3.md §4), in float32.

    q, k [B, T, H, D_k] already normalized and q scaled, v [B, T, H, D_v], log_decay [B, T, H, D_k] ≤ 0, beta
    [B, T, H], state [B, H, D_k, D_v] -> o [B, T, H, D_v] and the state after the last token. ``chunk_size`` is rounded
    up to a power of two; below 1 it is an InputError.
    """
    if chunk_size < 1:
        raise InputError("chunked_kda", "chunk_size", "at least 1", chunk_size, "pass the number of tokens of a chunk")
    batch, tokens, heads, _ = k.shape
    size = tree_size(chunk_size, tokens)
    stride = size * max(1, CHUNKS_AT_ONCE // (batch * heads))
    q, k, v, log_decay, beta, state = (wide(x) for x in (q, k, v, log_decay, beta, state))
    outputs = []
    for start in range(0, tokens, stride):
        inputs = (x[:, start : start + stride] for x in (q, k, log_decay, beta[..., None], v))
        *inputs, values = (into_chunks(x, size) for x in inputs)
        o, state = pass_over_chunks(within_chunks(*inputs), values, state)
        outputs.append(_out_of_chunks(o))
        if tokens > stride:
            mx.eval(state, outputs[-1])
    return mx.concatenate(outputs, axis=1)[:, :tokens], state


def _out_of_chunks(x: mx.array) -> mx.array:
    """[n, B, H, C, D] -> [B, n·C, H, D]."""
    _, batch, heads, _, width = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, -1, heads, width)


def _halves(x: mx.array, length: int) -> tuple[mx.array, mx.array]:
    """[..., C, D] in segments of ``length``: the first and the second of every two, [..., C/(2·length), length, D]."""
    x = x.reshape(*x.shape[:-2], -1, 2, length, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def _widened(from_start: mx.array, to_end: mx.array, length: int) -> tuple[mx.array, mx.array]:
    """The log-decays to both ends [..., C, D] of segments of ``length`` tokens -> those of segments of twice that."""
    first_from, second_from = _halves(from_start, length)
    first_to, second_to = _halves(to_end, length)
    first_whole, second_whole = first_from[..., -1:, :], second_from[..., -1:, :]
    from_start_wide = mx.concatenate([first_from, first_whole + second_from], axis=-2)
    to_end_wide = mx.concatenate([first_to + second_whole, second_to], axis=-2)
    return from_start_wide.reshape(from_start.shape), to_end_wide.reshape(to_end.shape)


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
