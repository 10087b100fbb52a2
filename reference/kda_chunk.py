"""Kimi Delta Attention over whole chunks of tokens: the recurrence of K3.md §4 written as matrix products (UT transform).

Within a chunk of C tokens let G_i be the log-decays summed over the chunk's tokens up to and including i, S the state
before the chunk. The delta rule's writes U and the outputs O are

    A_ij = beta_i  sum_d k_id k_jd exp(G_id - G_jd)   (j < i)      U = (I + A)^-1 diag(beta) (V - (K exp G) S)
    P_ij =         sum_d q_id k_jd exp(G_id - G_jd)   (j <= i)     O = (Q exp G) S + P U
                                                                   S <- diag(exp G_C) S + (K exp(G_C - G))^T U

exp(-G) is never formed (it overflows after a few strong decays) and no two running sums are ever subtracted (that
loses digits). Instead a chunk is a binary tree of segments. A segment carries its tokens decayed from its start and
to its end; where two neighbours meet, exp(G_i - G_j) = exp(start of the second .. i) * exp(j .. end of the first), so
one matrix product gives the pairs across the middle. Every exponent is a sum of log-decays, hence <= 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .errors import InputError

# A level's tensors of this many chunks (over all heads) fit a processor's cache: faster, and memory does not grow with T.
CHUNKS_AT_ONCE = 64


class Segments(NamedTuple):
    """M segments of L tokens each. A token has two readers of the state: its key (row 2i) and its query (row 2i + 1).

    readers      [M, 2L, Dk]  keys and queries, times exp(log-decay from the segment's start up to and including theirs)
    keys         [M, L, Dk]   keys, times exp(log-decay after theirs up to the segment's end)
    products     [M, 2L, L]   reader i with key j <= i, times exp(log-decay after j up to and including i); 0 for j > i
    log_decay    [M, 1, Dk]   the whole segment's log-decay
    """

    readers: Tensor
    keys: Tensor
    products: Tensor
    log_decay: Tensor


def single_tokens(q: Tensor, k: Tensor, log_decay: Tensor) -> Segments:
    """Segments of one token: [M, Dk] each. A token's own write is read after its decay, so its product has none."""
    readers = torch.stack((k, q), dim=1)
    products = (readers * k.unsqueeze(1)).sum(dim=-1, keepdim=True)
    log_decay = log_decay.unsqueeze(1)
    return Segments(readers * log_decay.exp(), k.unsqueeze(1), products, log_decay)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """[M, ...] -> every first and every second of two neighbours, [M/2, ...] each."""
    return x[0::2], x[1::2]


def merge_neighbours(segments: Segments) -> Segments:
    """M segments of L tokens -> M/2 segments of 2L tokens."""
    readers, later_readers = halves(segments.readers)
    keys, later_keys = halves(segments.keys)
    products, later_products = halves(segments.products)
    log_decay, later_log_decay = halves(segments.log_decay)
    across = later_readers @ keys.transpose(1, 2)
    return Segments(
        readers=torch.cat((readers, later_readers * log_decay.exp()), dim=1),
        keys=torch.cat((keys * later_log_decay.exp(), later_keys), dim=1),
        products=torch.cat(
            (torch.cat((products, torch.zeros_like(products)), dim=2), torch.cat((across, later_products), dim=2)), dim=1
        ),
        log_decay=log_decay + later_log_decay,
    )


def write_operator(key_products: Tensor, beta: Tensor) -> Tensor:
    """(I + A)^-1 diag(beta) by forward substitution; A is the strict lower triangle of beta_i * key_products_ij.

    key_products [M, C, C], beta [M, C] -> [M, C, C]. Never by repeated squaring, which cancels when keys are alike.
    """
    system = beta.unsqueeze(2) * key_products
    return torch.linalg.solve_triangular(system, torch.diag_embed(beta), upper=False, unitriangular=True)


def into_chunks(x: Tensor, size: int) -> Tensor:
    """[B, T, H, D] -> [n, B*H, C, D]; the last chunk is filled with zeros, which neither decay, write nor read."""
    batch, tokens, heads, width = x.shape
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -tokens % size))
    x = x.reshape(batch, -1, size, heads, width).permute(1, 0, 3, 2, 4)
    return x.reshape(-1, batch * heads, size, width)


def out_of_chunks(x: Tensor, batch: int, tokens: int) -> Tensor:
    """[n, B*H, C, D] -> [B, T, H, D]: the inverse of into_chunks."""
    chunks, _, size, width = x.shape
    x = x.reshape(chunks, batch, -1, size, width).permute(1, 0, 3, 2, 4)
    return x.reshape(batch, chunks * size, -1, width)[:, :tokens]


def chunked_kda(q, k, v, log_decay, beta, state, chunk_size=64):
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    batch, tokens, heads, _ = k.shape
    size = 1 << (max(1, min(chunk_size, tokens)) - 1).bit_length()
    stride = size * max(1, CHUNKS_AT_ONCE // (batch * heads))
    S = state.to(wide).flatten(0, 1)
    out = []
    for start in range(0, tokens, stride):
        part = [into_chunks(x[:, start : start + stride].to(wide), size) for x in (q, k, v, log_decay, beta.unsqueeze(-1))]
        o, S = some_chunks(*part, S)
        out.append(out_of_chunks(o, batch, min(stride, tokens - start)))
    return torch.cat(out, dim=1) if out else v.to(wide), S.unflatten(0, (batch, heads))


def some_chunks(q, k, v, log_decay, beta, state):
    chunks, rows, size, dk = k.shape
    segments = single_tokens(q.reshape(-1, dk), k.reshape(-1, dk), log_decay.reshape(-1, dk))
    while segments.keys.shape[1] < size:
        segments = merge_neighbours(segments)
    key_products, query_products = segments.products.unflatten(1, (size, 2)).unbind(2)
    write = write_operator(key_products, beta.reshape(-1, size))
    readers, keys, decay, write, P = (x.unflatten(0, (chunks, rows)) for x in (segments.readers, segments.keys.transpose(1,2), segments.log_decay.exp().transpose(1,2), write, query_products))
    outs = []
    for n in range(chunks):
        seen, out = (readers[n] @ state).unflatten(1, (size, 2)).unbind(2)
        U = write[n] @ (v[n] - seen)
        outs.append(torch.baddbmm(out, P[n], U))
        state = torch.baddbmm(decay[n] * state, keys[n], U)
    return torch.stack(outs), state
