"""Kimi Delta Attention over whole chunks of tokens: the recurrence of K3.md §4 as matrix products (the UT transform).

Take one head and a chunk of C tokens. G_i is the sum of the chunk's log-decays up to and including token i, S the
state before the chunk. What each token writes (rows of U) and reads (rows of O), and the state after the chunk, are

    A_ij = β_i Σ_d k_id k_jd exp(G_id − G_jd)  (j < i)      U = (I + A)⁻¹ diag(β) (V − (K exp G) S)
    P_ij =     Σ_d q_id k_jd exp(G_id − G_jd)  (j ≤ i)      O = (Q exp G) S + P U
                                                            S ← diag(exp G_C) S + (K exp(G_C − G))ᵀ U

exp(−G) is never formed, because a few strong decays make it infinite, and no running sum is subtracted from another,
because that loses digits. Instead the chunk is a binary tree of halves. Where two neighbouring segments meet, every
pair across the middle factors through it: exp(G_i − G_j) = exp(Σ middle…i) · exp(Σ j+1…middle). So each segment keeps
its tokens decayed from its start and decayed to its end, one matrix product gives all pairs across a middle, and the
longer segment's factors are the shorter ones' times a neighbour's whole decay. No exponent is ever positive.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from reference.errors import InputError
from reference.linear import wide

# So many tokens, over all heads, are prepared at once: few enough that what a level of the tree works on stays in the
# processor's cache and that memory does not grow with the prompt, many enough for batched products.
TOKENS_AT_ONCE = 2048


def tree_size(chunk_size: int, tokens: int) -> int:
    """Tokens in a chunk: the power of two at or above ``chunk_size``, or above the whole input if that is shorter."""
    return 1 << (max(1, min(chunk_size, tokens)) - 1).bit_length()


def into_chunks(x: Tensor, size: int) -> Tensor:
    """[B, T, H, D] -> [n, B, H, size, D], a view of x if ``size`` divides T.

    Otherwise the last chunk is filled with zeros: a step with k = 0, β = 0 and log-decay 0 changes nothing.
    """
    missing = -x.shape[1] % size
    if missing:
        x = F.pad(x, (0, 0, 0, 0, 0, missing))
    return x.unflatten(1, (-1, size)).permute(1, 0, 3, 2, 4)


def pairs_across(products: Tensor, length: int) -> Tensor:
    """The places in ``products`` [N, C, R, C] where the second of two segments of ``length`` tokens meets the first.

    A view [N, C / (2 · length), length, R, length]: (row, reader, column) for each pair of neighbouring segments.
    """
    number, size, readers, _ = products.shape
    neighbours = size // (2 * length)
    blocks = products.view(number, neighbours, 2, length, readers, neighbours, 2, length)[:, :, 1, :, :, :, 0]
    return blocks.diagonal(dim1=1, dim2=4).movedim(-1, 1)


def decayed_products(readers: Tensor, keys: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_d r_id k_jd exp(G_id − G_jd) for all pairs j < i of each chunk, by the tree of halves, levels 1, 2, … C/2.

    readers [N, C, R, D] (R vectors of each token that read the state after its decay: its key, its query), keys and
    log_decay [N, C, D] -> products [N, C, R, C], zero where j ≥ i, and exp(G_C) [N, D]. The tree's last level leaves,
    **in place**, readers · exp(G) and keys · exp(G_C − G), which is what meets the states at the chunk's two ends.
    """
    number, size, count, width = readers.shape
    products = readers.new_zeros(number, size, count, size)
    decay = log_decay.exp()
    readers *= decay.unsqueeze(2)
    length = 1
    while length < size:
        second_readers = readers.view(-1, 2, length * count, width)[:, 1]
        first_keys = keys.view(-1, 2, length, width)[:, 0]
        across = torch.bmm(second_readers, first_keys.mT)
        pairs_across(products, length).copy_(across.view(number, -1, length, count, length))
        first_decay, second_decay = decay.reshape(-1, 2, 1, width).unbind(1)
        second_readers *= first_decay
        first_keys *= second_decay
        first_log_decay, second_log_decay = log_decay.reshape(-1, 2, width).unbind(1)
        log_decay = first_log_decay + second_log_decay
        decay = log_decay.exp()
        length *= 2
    return products, decay.view(number, width)


def write_operator(key_products: Tensor, beta: Tensor) -> Tensor:
    """(I + A)⁻¹ diag(β), A = diag(β) · key_products, by forward substitution.

    key_products [N, C, C], of which only the strict lower triangle counts, beta [N, C] -> [N, C, C]. Powers of A
    (repeated squaring) would give the same in exact arithmetic, but cancel where neighbouring keys are alike.
    """
    A = beta.unsqueeze(2) * key_products
    return torch.linalg.solve_triangular(A, torch.diag_embed(beta), upper=False, unitriangular=True)


class ChunkTerms(NamedTuple):
    """What chunks contribute before any state is known; in each, the first two axes are [n, B·H].

    readers  [.., 2C, D_k]  rows of K exp(G) and Q exp(G), taking turns: what meets the state before the chunk
    M        [.., C, C]     (I + A)⁻¹ diag(β)
    P        [.., C, C]
    keys     [.., D_k, C]   (K exp(G_C − G))ᵀ
    decay    [.., D_k, 1]   exp(G_C)
    """

    readers: Tensor
    M: Tensor
    P: Tensor
    keys: Tensor
    decay: Tensor


def within_chunks(q: Tensor, k: Tensor, log_decay: Tensor, beta: Tensor) -> ChunkTerms:
    """The terms of n chunks at once. q, k, log_decay [n, B, H, C, D_k], beta [n, B, H, C, 1]; nothing is changed."""
    n, _, _, size, width = k.shape
    readers = k.new_empty(*k.shape[:-1], 2, width)
    readers[..., 0, :], readers[..., 1, :] = k, q
    readers = readers.view(-1, size, 2, width)
    keys = k.clone(memory_format=torch.contiguous_format).view(-1, size, width)
    own_write = (readers[:, :, 1] * keys).sum(-1)
    products, decay = decayed_products(readers, keys, log_decay.reshape(-1, size, width))
    key_products, P = products[:, :, 0], products[:, :, 1]
    P.diagonal(dim1=1, dim2=2).copy_(own_write)
    M = write_operator(key_products, beta.reshape(-1, size))
    terms = (readers.flatten(1, 2), M, P, keys.mT, decay.unsqueeze(2))
    return ChunkTerms(*(term.unflatten(0, (n, -1)) for term in terms))


def pass_over_chunks(terms: ChunkTerms, v: Tensor, S: Tensor, o: Tensor) -> None:
    """Carry the state S [B·H, D_k, D_v] through n chunks and write what is read into o; both **in place**.

    v, o [n, B, H, C, D_v]. The only sequential part.
    """
    for n, (readers, M, P, keys, decay, V) in enumerate(zip(*terms, v.flatten(1, 2), strict=True)):
        expected, read = torch.bmm(readers, S).unflatten(1, (-1, 2)).unbind(2)
        U = torch.bmm(M, V - expected)
        o[n] = (read + torch.bmm(P, U)).view_as(o[n])
        S.mul_(decay).baddbmm_(keys, U)


def chunked_kda(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, chunk_size: int = 32
) -> tuple[Tensor, Tensor]:
    """The same function as ``recurrent_kda``, chunk by chunk (K3.md §4), in float32, or float64 for a float64 v.

    q, k [B, T, H, D_k] already normalized and q scaled, v [B, T, H, D_v], log_decay [B, T, H, D_k] ≤ 0, beta
    [B, T, H], state [B, H, D_k, D_v] -> o [B, T, H, D_v] and the state after the last token. Any T ≥ 0; nothing
    given is changed. ``chunk_size`` is rounded up to a power of two; below 1 it is an InputError; 32 was measured the
    quickest at D = 128. Inputs must be finite: within a chunk, zeros meet later tokens, and 0 · NaN is NaN.
    """
    if chunk_size < 1:
        raise InputError("chunked_kda", "chunk_size", "at least 1", chunk_size, "pass the number of tokens of a chunk")
    batch, tokens, heads, _ = k.shape
    size = tree_size(chunk_size, tokens)
    stride = size * max(1, TOKENS_AT_ONCE // (size * batch * heads))
    q, k, v, log_decay, beta, state = (wide(x) for x in (q, k, v, log_decay, beta, state))
    S = state.flatten(0, 1).clone()
    o = v.new_empty(batch, tokens + -tokens % size, heads, v.shape[-1])
    for start in range(0, tokens, stride):
        part = slice(start, start + stride)
        inputs = (x[:, part] for x in (q, k, log_decay, beta.unsqueeze(-1), v, o))
        *inputs, values, outputs = (into_chunks(x, size) for x in inputs)
        pass_over_chunks(within_chunks(*inputs), values, S, outputs)
    return o[:, :tokens], S.unflatten(0, (batch, heads))
