"""A mini checkpoint on which two kinds of text want different experts.

The two domains use different halves of the vocabulary. Their embeddings lie on either side of one direction, and in
every MoE layer half of the router's rows are turned towards what this direction has become there, half away from it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from fixtures.base import layers, merged
from fixtures.catalogue import Entry, entry
from fixtures.inputs import special_ids
from parity.tests.saliency_models import edited, moe_name
from reference.taps import Recorder, recording

EXPERTS, TOP_K, APART, TURN = 24, 3, 1.0, 3.0
EMBEDDING = "language_model.model.embed_tokens.weight"
DOMAINS = ("low", "high")


def domain_entry() -> Entry:
    """Every width fits every tier, 24 experts of which a token takes 3."""
    text = {"num_experts": EXPERTS, "num_experts_per_token": TOP_K} | layers("kkmk")
    return Entry("domains", merged(entry("quantizable").config, {"text_config": text}), shard_bytes=1 << 20)


def domain_ids(item: Entry, domain: str, what: str, sequences: int, tokens: int) -> list[np.ndarray]:
    """Sequences of a domain's own ids; ``what`` tells calibration from held-out text."""
    ordinary = np.setdiff1d(np.arange(item.parsed.text_config.vocab_size), special_ids(item))
    own = np.array_split(ordinary, len(DOMAINS))[DOMAINS.index(domain)]
    key = hashlib.sha256(f"{domain}/{what}".encode()).digest()
    return list(np.random.default_rng(list(key)).choice(own, (sequences, tokens)))


def calibration(item: Entry) -> dict[str, list[np.ndarray]]:
    return {domain: domain_ids(item, domain, "calibration", 5, 40) for domain in DOMAINS}


def held_out(item: Entry, domain: str) -> np.ndarray:
    """Ids [3, 40] that no calibration has seen."""
    return np.stack(domain_ids(item, domain, "held out", 3, 40))


def domain_checkpoint(folder: Path) -> tuple[Entry, Path]:
    """The entry and its checkpoint, router after router turned."""
    item = domain_entry()
    hidden = item.parsed.text_config.hidden_size
    direction = np.random.default_rng(7).choice([-1.0, 1.0], hidden) * APART
    halves = np.array_split(np.arange(item.parsed.text_config.vocab_size), len(DOMAINS))

    def apart(rows: np.ndarray) -> np.ndarray:
        sides = np.where(np.isin(np.arange(len(rows)), halves[0]), 1.0, -1.0)
        return rows.astype(np.float64) + sides[:, None] * direction

    source = edited(item, folder / "apart", {EMBEDDING: apart})
    turned = {EMBEDDING: apart}
    for layer, towards in between(item, source).items():
        turned[moe_name(layer, "gate.weight")] = turner(towards)
    return item, edited(item, folder / "domains", turned)


def turner(towards: np.ndarray):
    """Rows of even experts turned towards a vector [hidden], those of odd ones away."""
    unit = towards / np.linalg.norm(towards)

    def turn(rows: np.ndarray) -> np.ndarray:
        side = np.where(np.arange(len(rows)) % 2 == 0, 1.0, -1.0)
        return rows.astype(np.float64) + TURN / np.linalg.norm(towards) * side[:, None] * unit

    return turn


def between(item: Entry, folder: Path) -> dict[int, np.ndarray]:
    """MoE layer -> the mean difference of the two domains' router inputs [hidden]."""
    import mlx.core as mx

    from port.weights import load_model

    model, means, text = load_model(folder), [], item.parsed.text_config
    moe = [layer for layer in range(text.num_hidden_layers) if text.is_moe(layer)]
    for domain in DOMAINS:
        with recording(Recorder()) as recorder:
            mx.eval(model(mx.array(np.stack(calibration(item)[domain]))))
        taps = {layer: recorder.values[f"language_model.model.layers.{layer}.mlp.input"] for layer in moe}
        means.append({layer: np.array(value).reshape(-1, value.shape[-1]).mean(0) for layer, value in taps.items()})
    return {layer: means[0][layer] - means[1][layer] for layer in moe}
