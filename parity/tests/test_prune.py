"""Pruning by plan: experts, router rows and correction bias are renumbered together (K3.md §15)."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.build import cached
from fixtures.catalogue import CATALOGUE, entry
from fixtures.inputs import token_ids
from fixtures.widened import widened
from parity.dequantized import Folder
from parity.metrics import relative_rms
from port import tiers
from port.convert import convert
from port.output_config import read_conversion
from port.prune import checked_plan, read_plan
from port.tiers import TIERS
from port.weights import load_model
from reference.config import K3Config
from reference.errors import InputError
from reference.taps import Recorder, recording

ALLOWED = 2e-4
ENTRIES = {name: widened(entry(name)) for name in ("quantizable", "mini", "groups", "dense-heavy", "top-one")}


def moe_layers(config: K3Config) -> list[int]:
    text = config.text_config
    return [layer for layer in range(text.num_hidden_layers) if text.is_moe(layer)]


def plan_of(config: K3Config, seed: int, drop: int = 2) -> dict[int, list[int]]:
    """A plan that drops ``drop`` experts of every group of every layer, in any order within the groups."""
    text, draw = config.text_config, np.random.default_rng(seed)
    size = text.num_experts // text.expert_groups
    fewest = -(-text.num_experts_per_token // text.chosen_groups)
    keep = max(size - drop, fewest, min(2, size) if text.expert_groups > 1 else 1)
    return {
        layer: [int(group * size + e) for group in range(text.expert_groups) for e in draw.permutation(size)[:keep]]
        for layer in moe_layers(config)
    }


def run(model, ids: np.ndarray) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Logits, and layer -> the chosen experts [B·T, k]."""
    with recording(Recorder()) as recorder:
        logits = np.array(model(mx.array(ids)))
        chosen = {name: np.array(value) for name, value in recorder.values.items() if name.endswith("router.indices")}
    return logits, {int(name.split(".")[3]): value for name, value in chosen.items()}


def without(model, plan: dict[int, list[int]]):
    """``model`` with the correction bias of all experts that ``plan`` drops at −inf."""
    for layer, keep in plan.items():
        gate = model.language_model.model.layers[layer].block_sparse_moe.gate
        kept = np.isin(np.arange(len(gate.e_score_correction_bias)), keep)
        gate.e_score_correction_bias = mx.where(mx.array(kept), gate.e_score_correction_bias, -mx.inf)
    return model


def agrees_with_minus_infinity(full: Path, pruned: Path, plan: dict[int, list[int]], ids: np.ndarray) -> bool:
    """The same experts for every token, by their old numbers, and the same logits."""
    expected, chosen = run(without(load_model(full), plan), ids)
    found, renumbered = run(load_model(pruned), ids)
    same = all(
        np.array_equal(np.sort(np.asarray(plan[layer])[renumbered[layer]], axis=-1), chosen[layer]) for layer in plan
    )
    return same and relative_rms(found, expected) <= ALLOWED


@pytest.mark.parametrize("tier", TIERS)
def test_an_identity_plan_changes_no_byte_of_any_tensor(tier: str, tmp_path: Path):
    item = ENTRIES["mini"]
    plan = {layer: list(range(item.parsed.text_config.num_experts)) for layer in moe_layers(item.parsed)}
    convert(cached(item), tmp_path / "plain", tier, sync=False)
    convert(cached(item), tmp_path / "planned", tier, plan=plan, sync=False)
    plain, planned = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("plain", "planned")
    )
    configs = [json.loads(folder.pop("config.json")) for folder in (plain, planned)]
    assert plain == planned
    records = [config.pop("k3_parity_conversion") for config in configs]
    assert configs[0] == configs[1]
    assert records[1]["plan"] == {str(layer): experts for layer, experts in plan.items()} and records[0]["plan"] is None


@pytest.mark.parametrize(
    ("name", "tier"), [*(("quantizable", tier) for tier in TIERS), *((name, "2bit") for name in list(ENTRIES)[1:])]
)
def test_a_pruned_model_is_the_full_one_without_the_dropped(name: str, tier: str, tmp_path: Path):
    item = ENTRIES[name]
    plan = plan_of(item.parsed, 1)
    assert all(len(keep) < item.parsed.text_config.num_experts for keep in plan.values())
    convert(cached(item), tmp_path / "full", tier, sync=False)
    convert(cached(item), tmp_path / "pruned", tier, plan=plan, sync=False)
    ids = token_ids(item, "prune.input_ids", (2, 24))
    assert agrees_with_minus_infinity(tmp_path / "full", tmp_path / "pruned", plan, ids)
    config = K3Config.from_file(tmp_path / "pruned")
    assert config.text_config.num_experts == len(next(iter(plan.values())))
    assert read_conversion(tmp_path / "pruned").plan == {layer: tuple(keep) for layer, keep in plan.items()}


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(CATALOGUE)), tier=st.sampled_from(list(TIERS)), seed=st.integers(0, 999))
def test_any_plan_of_any_configuration(name: str, tier: str, seed: int, tmp_path_factory: pytest.TempPathFactory):
    item, tmp_path = widened(entry(name)), tmp_path_factory.mktemp("plan")
    softmax = item.parsed.text_config.moe_router_activation_func == "softmax"
    tier = "3bit" if item.expert_format == "dense" else tier
    plan = plan_of(item.parsed, seed, drop=0 if softmax else 1 + seed % 3)
    convert(cached(item), tmp_path / "full", tier, sync=False)
    convert(cached(item), tmp_path / "pruned", tier, plan=plan, sync=False)
    ids = token_ids(item, "prune.input_ids", (2, 12), seed)
    assert agrees_with_minus_infinity(tmp_path / "full", tmp_path / "pruned", plan, ids)


def test_layers_may_keep_different_numbers(tmp_path: Path):
    """Stock loaders build every layer alike; the port reads the plan."""
    item = ENTRIES["mini"]
    plan = {layer: keep[: 4 + layer % 3] for layer, keep in plan_of(item.parsed, 2).items()}
    convert(cached(item), tmp_path / "full", "2bit", sync=False)
    convert(cached(item), tmp_path / "pruned", "2bit", plan=plan, sync=False)
    ids = token_ids(item, "prune.input_ids", (2, 24))
    assert agrees_with_minus_infinity(tmp_path / "full", tmp_path / "pruned", plan, ids)


FAULTS = ("router rows rotated by one", "correction bias not renumbered", "experts not renumbered")


@pytest.mark.parametrize("fault", FAULTS)
def test_renumbering_one_without_the_others_is_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    item = ENTRIES["quantizable"]
    plan = plan_of(item.parsed, 1)
    convert(cached(item), tmp_path / "full", "mxfp4", sync=False)
    row_output, expert_outputs = tiers.row_output, tiers.expert_outputs

    def other_rows(config, row, tier, keep):
        if keep and fault == FAULTS[0] and row[0].endswith(".gate.weight"):
            keep = (*keep[1:], keep[0])
        if keep and fault == FAULTS[1] and row[0].endswith(tiers.CORRECTION_BIAS):
            keep = tuple(range(len(keep)))
        return row_output(config, row, tier, keep)

    def other_experts(prefix, tier, rows, experts):
        experts = range(len(experts)) if fault == FAULTS[2] else experts
        return expert_outputs(prefix, tier, rows, experts)

    with monkeypatch.context() as patch:
        patch.setattr(tiers, "row_output", other_rows)
        patch.setattr(tiers, "expert_outputs", other_experts)
        convert(cached(item), tmp_path / "pruned", "mxfp4", plan=plan, sync=False)
    ids = token_ids(item, "prune.input_ids", (2, 24))
    assert not agrees_with_minus_infinity(tmp_path / "full", tmp_path / "pruned", plan, ids)


def test_pruned_experts_are_the_kept_ones_byte_for_byte(tmp_path: Path):
    item = ENTRIES["quantizable"]
    plan = plan_of(item.parsed, 3)
    convert(cached(item), tmp_path / "full", "2bit", sync=False)
    convert(cached(item), tmp_path / "pruned", "2bit", plan=plan, sync=False)
    full, pruned = Folder(tmp_path / "full"), Folder(tmp_path / "pruned")
    for name in pruned:
        layer = int(name.split(".")[3]) if ".layers." in name else None
        of_experts = ".switch_mlp." in name or ".block_sparse_moe.gate." in name
        expected = full.array(name)[plan[layer]] if of_experts else full.array(name)
        assert pruned.array(name).tobytes() == expected.tobytes(), name


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ({1: [0, 1, 2]}, "layer 2: expected a list of experts, found nothing"),
        ({0: [0, 1, 2]}, "layer 0: expected only MoE layers"),
        ({1: [0, 1, 8]}, "layer 1: expected experts 0 to 7, found 8"),
        ({1: [0, 1, -1]}, "layer 1: expected experts 0 to 7, found -1"),
        ({1: [0, 1, 1]}, "layer 1: expected each expert once, found expert 1 twice"),
        ({1: [0, 1]}, "layer 1: expected at least 3 experts"),
        ({1: [0, 1, 2.0]}, "layer 1: expected a list of expert numbers"),
        ({1: "012"}, "layer 1: expected a list of expert numbers"),
    ],
)
def test_plans_that_are_none(keep: dict, message: str, tmp_path: Path):
    config = entry("mini").parsed
    every = {} if "nothing" in message else {layer: [0, 1, 2] for layer in (1, 2, 3, 4)}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"keep": {str(layer): experts for layer, experts in (every | keep).items()}}))
    with pytest.raises(InputError, match=message) as caught:
        read_plan(file, config)
    assert str(file) in str(caught.value)


def test_groups_are_pruned_evenly_and_softmax_not_at_all():
    groups, softmax = entry("groups").parsed, entry("softmax-router").parsed
    with pytest.raises(InputError, match="equally many of each of the 4 expert groups"):
        checked_plan({layer: [0, 1, 2, 3, 4, 5, 8, 12] for layer in moe_layers(groups)}, groups)
    with pytest.raises(InputError, match="all experts of a softmax router"):
        checked_plan({layer: [0, 1, 2, 3] for layer in moe_layers(softmax)}, softmax)
