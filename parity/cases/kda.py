"""Kimi Delta Attention: its gate, its recurrence and the chunked form of it (K3.md §4)."""

import numpy as np

from parity.cases.base import Drawn, FunctionCase, unit

HEADS, HEAD_DIM = 3, 16
CHUNK = 16


def draw_vectors(regime: str, rng: np.random.Generator, name: str) -> Drawn:
    """Keys of length 1e-3 and below feel whether the 1e-6 is inside the root, and on the sum."""
    scale = {"random": 1.0, "tiny": 1e-3, "tinier": 1e-4, "large": 1e3, "zero": 0.0}[regime]
    return Drawn({name: scale * unit(rng, 2, 5, HEADS, HEAD_DIM)})


def draw_strength(regime: str, rng: np.random.Generator) -> Drawn:
    return Drawn({"logits": {"random": 2.0, "saturated": 30.0}[regime] * rng.standard_normal((2, 9, HEADS))})


def draw_log_decay(regime: str, rng: np.random.Generator) -> Drawn:
    """Every head has its own A_log; the entries beyond the heads hold numbers that must not be used. Where the decay is
    slow, softplus is a small number: log(1 + exp z) without log1p loses most of its digits."""
    A_log = np.concatenate([np.linspace(-1.5, 1.5, HEADS), np.full(HEAD_DIM - HEADS, 7.0)])
    if regime == "zero-padded":
        A_log[HEADS:] = 0.0
    z = {"saturated": 12.0}.get(regime, 2.0) * rng.standard_normal((2, 9, HEADS, HEAD_DIM))
    z -= {"slow": 8.0, "unbounded-slow": 14.0}.get(regime, 0.0)
    arrays = {"decay_logit": z, "A_log": A_log, "dt_bias": rng.standard_normal(HEADS * HEAD_DIM)}
    return Drawn(arrays, {"lower_bound": None if regime.startswith("unbounded") else -5.0})


def draw_recurrence(regime: str, rng: np.random.Generator) -> Drawn:
    """q, k already normalized; D_k ≠ D_v throughout, so that no axis can be taken for another."""
    tokens = {"one-token": 1, "chunk-1": CHUNK - 1, "chunk": CHUNK, "long-slow": 1024}.get(regime, 3 * CHUNK + 1)
    key_dim, value_dim, batch = HEAD_DIM, 12, 1 if regime == "long-slow" else 2
    q = unit(rng, batch, tokens, HEADS, key_dim) * key_dim**-0.5
    k = unit(rng, batch, tokens, HEADS, key_dim)
    log_decay = -5.0 * rng.uniform(0.001, 0.5, k.shape)
    beta = rng.uniform(0.05, 0.95, k.shape[:3])
    if regime == "decay-at-bound":
        log_decay = np.full(k.shape, -5.0)
    if regime == "unbounded":
        log_decay = np.full(k.shape, -50.0)
    if regime == "mixed-heads":
        log_decay = np.broadcast_to(np.array([-5.0, -0.001, -2.5])[:, None], k.shape).copy()
    if regime == "alike-keys":
        k = np.broadcast_to(k[:, :1], k.shape).copy()
        log_decay, beta = np.full(k.shape, -0.001), np.full(beta.shape, 0.99)
    if regime == "tiny-keys":
        k *= 1e-4
    if regime == "long-slow":
        log_decay = np.full(k.shape, np.log(0.999))
    state = 0.3 * rng.standard_normal((batch, HEADS, key_dim, value_dim))
    v = rng.standard_normal((batch, tokens, HEADS, value_dim))
    return Drawn({"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "state": state})


def draw_chunked(regime: str, rng: np.random.Generator) -> Drawn:
    return Drawn(draw_recurrence(regime, rng).arrays, {"chunk_size": CHUNK})


def draw_output_norm(regime: str, rng: np.random.Generator) -> Drawn:
    scale = {"random": 1.0, "tiny": 1e-3, "large": 1e3}[regime]
    shape = (2, 5, HEADS, HEAD_DIM)
    arrays = {"o": scale * rng.standard_normal(shape), "gate_logit": 2.0 * rng.standard_normal(shape)}
    return Drawn(arrays | {"weight": rng.uniform(0.5, 1.5, HEAD_DIM)}, {"eps": 1e-5})


REGIMES = ("random", "decay-at-bound", "unbounded", "mixed-heads", "alike-keys", "tiny-keys")
LENGTHS = ("one-token", "chunk-1", "chunk", "long-slow")
WIDE = frozenset({"q", "k", "v", "log_decay", "beta", "state"})

CASES = (
    FunctionCase(
        "kda.l2_normalize",
        "kda.recurrence",
        "§4.2",
        ("unit",),
        ("random", "tiny", "tinier", "large", "zero"),
        lambda regime, rng: draw_vectors(regime, rng, "x"),
    ),
    FunctionCase(
        "kda.scaled_query",
        "kda.recurrence",
        "§4.2",
        ("query",),
        ("random", "tiny", "large"),
        lambda regime, rng: draw_vectors(regime, rng, "q"),
    ),
    FunctionCase("kda.write_strength", "kda.gate", "§4.3", ("beta",), ("random", "saturated"), draw_strength),
    FunctionCase(
        "kda.log_decay",
        "kda.gate",
        "§4.4",
        ("log_decay",),
        ("random", "zero-padded", "saturated", "slow", "unbounded", "unbounded-slow"),
        draw_log_decay,
        wide=frozenset({"A_log", "dt_bias"}),
    ),
    FunctionCase(
        "kda.recurrent_kda",
        "kda.recurrence",
        "§4.5",
        ("o", "state"),
        (*REGIMES, *LENGTHS),
        draw_recurrence,
        wide=WIDE,
    ),
    FunctionCase(
        "kda_chunk.chunked_kda",
        "kda.recurrence",
        "§4.5",
        ("o", "state"),
        (*REGIMES, *LENGTHS),
        draw_chunked,
        wide=WIDE,
    ),
    FunctionCase(
        "kda.gated_output_norm",
        "kda.output",
        "§4.6",
        ("output",),
        ("random", "tiny", "large"),
        draw_output_norm,
        wide=frozenset({"weight"}),
    ),
)
