"""Two domains, end to end: calibrate, plan, convert, load; and what a plan is worth against chance (K3.md §15)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from typer.testing import CliRunner

from parity.cli.main import app
from parity.metrics import relative_rms
from parity.tests.domain_model import DOMAINS, EXPERTS, calibration, domain_checkpoint, held_out
from port.output_config import read_conversion
from port.saliency import bias_of, exclude
from port.weights import load_model
from reference.config import K3Config
from reference.saliency_result import load_saliency

KEEP, SEEDS = 12, 10
PLANS = {"low": ["--domains", "low"], "high": ["--domains", "high"], "both": []}


class Pruned(NamedTuple):
    """Everything that the commands wrote, and the held-out logits of the full model."""

    folder: Path
    source: Path
    full: dict[str, np.ndarray]
    ids: dict[str, np.ndarray]

    def plan(self, name: str) -> dict[int, list[int]]:
        document = json.loads((self.folder / f"{name}.json").read_text())
        return {int(layer): experts for layer, experts in document["keep"].items()}

    def error(self, model, domain: str) -> float:
        return relative_rms(np.array(model(mx.array(self.ids[domain]))), self.full[domain])


def command(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (arguments, result.output, result.exception)
    return result.stdout


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Pruned:
    folder = tmp_path_factory.mktemp("reap")
    item, source = domain_checkpoint(folder)
    tokens = {domain: [row.tolist() for row in rows] for domain, rows in calibration(item).items()}
    (folder / "tokens.json").write_text(json.dumps(tokens))
    calibrate = ("reap", "calibrate", "--checkpoint", source, "--tokens", folder / "tokens.json")
    command(*calibrate, "--out", folder / "s.npz")
    for name, domains in PLANS.items():
        plan = folder / f"{name}.json"
        command("reap", "plan", folder / "s.npz", "--keep", KEEP, *domains, "--out", plan)
        command("convert", source, folder / name, "--tier", "mxfp4", "--plan", plan, "--no-sync")
    model, ids = load_model(source), {domain: held_out(item, domain) for domain in DOMAINS}
    full = {domain: np.array(model(mx.array(ids[domain]))) for domain in DOMAINS}
    return Pruned(folder, source, full, ids)


def test_the_domains_route_differently(pruned: Pruned):
    """Of the routings less than a third is common, and of the best experts less than two random picks would have."""
    counts = load_saliency(pruned.folder / "s.npz").counts
    shares = counts / counts.sum(-1, keepdims=True)
    assert (shares.min(0).sum(-1) < 1 / 3).all()
    found = json.loads(command("reap", "overlap", pruned.folder / "s.npz", "--keep", 4, "--json"))
    assert found["chance"] == 4 / EXPERTS and found["shared"][0][0] == found["shared"][1][1] == 1
    assert found["unrouted"] == [0, 0]
    assert found["shared"][0][1] < found["chance"]
    found = json.loads(command("reap", "overlap", pruned.folder / "s.npz", "--keep", KEEP, "--json"))
    assert min(found["kept"][0][0], found["kept"][1][1]) > 0.9 > 0.7 > max(found["kept"][0][1], found["kept"][1][0])


def test_what_was_kept_is_what_works(pruned: Pruned):
    """Held-out error against the full model: lower on the domain that was kept, for either; both in between."""
    errors = {name: {d: pruned.error(load_model(pruned.folder / name), d) for d in DOMAINS} for name in PLANS}
    print(json.dumps(errors, indent=1))
    assert errors["low"]["low"] < errors["both"]["low"] < errors["high"]["low"]
    assert errors["high"]["high"] < errors["both"]["high"] < errors["low"]["high"]
    assert errors["low"]["low"] < 0.6 * errors["low"]["high"] and errors["high"]["high"] < 0.6 * errors["high"]["low"]


def test_the_converted_folders_are_the_plans(pruned: Pruned):
    for name in PLANS:
        conversion = read_conversion(pruned.folder / name)
        assert {layer: list(keep) for layer, keep in conversion.plan.items()} == pruned.plan(name)
        assert K3Config.from_file(pruned.folder / name).text_config.num_experts == KEEP


def test_verify_finds_the_folders_to_be_their_sources_conversions(pruned: Pruned):
    """Every kept expert under its new number."""
    verify = pytest.importorskip("parity.cli.verify", reason="this tree has no verify command")
    assert verify
    for name in PLANS:
        command("verify", pruned.folder / name, "--source", pruned.source, "--plan", pruned.folder / f"{name}.json")


def random_plan(seed: int, layers) -> dict[int, list[int]]:
    draw = np.random.default_rng(seed)
    return {layer: draw.choice(EXPERTS, KEEP, replace=False).tolist() for layer in layers}


def errors_without(model, pruned: Pruned, plan: dict[int, list[int]]) -> dict[str, float]:
    """Errors of the full model whose other experts are never chosen, which equals the pruned one."""
    layers = model.language_model.model.layers
    before = {layer: bias_of(layers[layer]) for layer in plan}
    for layer, keep in plan.items():
        exclude(layers[layer], keep)
    errors = {domain: pruned.error(model, domain) for domain in DOMAINS}
    for layer, bias in before.items():
        layers[layer].block_sparse_moe.gate.e_score_correction_bias = bias
    return errors


@pytest.mark.slow
def test_a_random_plan_of_the_same_size_is_worse(pruned: Pruned):
    model = load_model(pruned.source)
    planned = errors_without(model, pruned, pruned.plan("both"))
    assert planned == pytest.approx({d: pruned.error(load_model(pruned.folder / "both"), d) for d in DOMAINS}, rel=1e-3)
    drawn = [errors_without(model, pruned, random_plan(seed, pruned.plan("both"))) for seed in range(SEEDS)]
    for domain in DOMAINS:
        errors = [found[domain] for found in drawn]
        print(f"{domain}: saliency {planned[domain]:.3f}, random {min(errors):.3f} to {max(errors):.3f}")
        assert planned[domain] < 0.8 * min(errors)


@pytest.mark.slow
def test_both_twins_make_the_same_plan(pruned: Pruned):
    folder = pruned.folder
    calibrate = ("reap", "calibrate", "--checkpoint", pruned.source, "--tokens", folder / "tokens.json")
    command(*calibrate, "--out", folder / "r.npz", "--with", "reference")
    found, expected = load_saliency(folder / "r.npz"), load_saliency(folder / "s.npz")
    assert np.array_equal(found.counts, expected.counts)
    np.testing.assert_allclose(found.mass, expected.mass, rtol=1e-5)
    for name, domains in PLANS.items():
        command("reap", "plan", folder / "r.npz", "--keep", KEEP, *domains, "--out", folder / "again.json")
        assert json.loads((folder / "again.json").read_text())["keep"] == {
            str(layer): experts for layer, experts in pruned.plan(name).items()
        }


@pytest.mark.peers
def test_stock_mlx_lm_loads_what_is_left(pruned: Pruned):
    utils = pytest.importorskip("mlx_lm.utils")
    for name in PLANS:
        theirs, _ = utils.load_model(pruned.folder / name)
        theirs.set_dtype(mx.float32)
        ours = load_model(pruned.folder / name)
        for domain in DOMAINS:
            found = np.array(theirs(mx.array(pruned.ids[domain])))
            assert relative_rms(found, np.array(ours(mx.array(pruned.ids[domain])))) <= 2e-4
