"""Saliency: streamed equals whole, in both twins, and what must and must not move it (K3.md §15)."""

from __future__ import annotations

import importlib
import sys
import weakref
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from fixtures.base import merged
from fixtures.build import cached
from fixtures.catalogue import CATALOGUE, Entry, entry
from parity.metrics import relative_rms
from parity.tests.saliency_models import TWINS, edited, largest_difference, moe_name, streamed, two_domains, whole
from parity.tolerance import CHAINED
from reference.errors import InputError
from reference.saliency_result import Saliency, load_saliency, pieces

ALLOWED = 1e-5
LAYER, ROW = 1, 0
"""The first MoE layer of ``mini`` and its place in a result."""
KEEPS = {
    "all": None,
    "uniform": {layer: [7, 0, 2, 5, 3] for layer in (1, 2, 3, 4)},
    "uneven": {1: [0, 1, 2], 2: [7, 6, 5, 4, 3], 3: list(range(8)), 4: [1, 3, 5, 7]},
}


@cache
def mini_saliency(twin: str, keep: str = "all") -> Saliency:
    """The streamed result of ``mini``, in pieces of two sequences and one."""
    item = entry("mini")
    return streamed(twin, cached(item), two_domains(item), keep=KEEPS[keep], piece_tokens=45)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("keep", KEEPS)
def test_streamed_equals_whole(twin: str, keep: str):
    item = entry("mini")
    found = mini_saliency(twin, keep)
    expected = whole(twin, cached(item), two_domains(item), keep=KEEPS[keep])
    assert np.array_equal(found.counts, expected.counts) and found.tokens.tolist() == [60, 27]
    assert largest_difference(found.per_domain(), expected.per_domain()) <= ALLOWED
    assert largest_difference(found.saliency(), expected.saliency()) <= ALLOWED
    for layer, experts in (KEEPS[keep] or {}).items():
        dropped = np.setdiff1d(np.arange(8), experts)
        assert not found.counts[:, layer - 1, dropped].any() and not found.mass[:, layer - 1, dropped].any()
        assert found.counts[:, layer - 1].sum() == 3 * 87


@pytest.mark.parametrize("keep", KEEPS)
def test_the_twins_agree(keep: str):
    both = [mini_saliency(twin, keep) for twin in TWINS]
    assert np.array_equal(both[0].counts, both[1].counts)
    assert largest_difference(both[1].per_domain(), both[0].per_domain()) <= ALLOWED


@pytest.mark.slow
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_configuration(name: str):
    """Streamed against whole within each twin, where summation order alone differs; the port against float64, measured
    by the reference's own rounding, as every chained quantity is."""
    item, results = entry(name), {}
    for twin in TWINS:
        results[twin] = streamed(twin, cached(item), two_domains(item))
        expected = whole(twin, cached(item), two_domains(item))
        assert np.array_equal(results[twin].counts, expected.counts)
        assert largest_difference(results[twin].per_domain(), expected.per_domain()) <= ALLOWED
    truth = streamed("reference", cached(item), two_domains(item), dtype="float64").per_domain()
    noise, error = (relative_rms(results[twin].per_domain(), truth) for twin in TWINS)
    assert error <= CHAINED.allowed("float32", noise, "float32")


@pytest.mark.parametrize("twin", TWINS)
def test_the_definition_by_hand(twin: str):
    """Three tokens, two of four experts each: S_j = (1/3) Σ weight · norm; expert 2 has none."""
    module, library = importlib.import_module(f"{twin}.saliency"), {"reference": "torch", "port": "mlx.core"}[twin]
    lib = importlib.import_module(library)
    make = lib.tensor if twin == "reference" else lib.array
    indices = make([[0, 1], [0, 3], [1, 3]])
    weights = make([[0.25, 0.75], [0.5, 0.5], [0.125, 0.875]])
    outputs = make([[[3.0, 4.0], [0.0, 2.0]], [[6.0, 8.0], [1.0, 0.0]], [[0.0, -8.0], [-4.0, 3.0]]])
    norms = module.output_norms(outputs)
    assert norms.tolist() == [[5, 2], [10, 1], [8, 5]]
    sums = module.expert_sums(indices, weights, norms, 4)
    assert sums.tolist() == [0.25 * 5 + 0.5 * 10, 0.75 * 2 + 0.125 * 8, 0, 0.5 * 1 + 0.875 * 5]
    assert module.expert_counts(indices, 4).tolist() == [2, 2, 0, 2]


def saliency_of(twin: str, tmp_path: Path, edits: dict) -> np.ndarray:
    """[E] of the first MoE layer of ``mini`` with other tensors."""
    item = entry("mini")
    folder = edited(item, tmp_path / "edited", edits)
    return streamed(twin, folder, two_domains(item), piece_tokens=45).saliency()[ROW]


@pytest.mark.parametrize("twin", TWINS)
def test_a_constant_added_to_all_biases_changes_nothing(twin: str, tmp_path: Path):
    before = mini_saliency(twin).saliency()[ROW]
    raised = {moe_name(LAYER, "gate.e_score_correction_bias"): lambda bias: bias + 0.5}
    np.testing.assert_array_equal(saliency_of(twin, tmp_path, raised), before)


def alike_but_for_the_bias() -> dict:
    """Experts 0 and 1 have equal weights and router rows and are both always chosen, expert 1 by a larger bias."""

    def biases(bias: np.ndarray) -> np.ndarray:
        return np.concatenate([[90, 99], bias[2:]])

    edits = {
        moe_name(LAYER, "gate.weight"): lambda rows: np.concatenate([rows[:1], rows[:1], rows[2:]]),
        moe_name(LAYER, "gate.e_score_correction_bias"): biases,
    }
    for part in ("w1", "w2", "w3"):
        edits |= {
            moe_name(LAYER, f"experts.{number}.{part}.weight_packed"): lambda array: np.full_like(array, 0x23)
            for number in (0, 1)
        }
        edits |= {
            moe_name(LAYER, f"experts.{number}.{part}.weight_scale"): lambda array: np.full_like(array, 125)
            for number in (0, 1)
        }
    return edits


@pytest.mark.parametrize("twin", TWINS)
def test_experts_that_differ_in_bias_alone_have_the_same_saliency(twin: str, tmp_path: Path):
    found = saliency_of(twin, tmp_path, alike_but_for_the_bias())
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("twin", TWINS)
def test_an_expert_that_no_token_chooses_has_none(twin: str, tmp_path: Path):
    low = {moe_name(LAYER, "gate.e_score_correction_bias"): lambda bias: np.where(np.arange(8) == 5, -1e4, bias)}
    found = saliency_of(twin, tmp_path, low)
    assert found[5] == 0 and np.count_nonzero(found) == 7


@pytest.mark.parametrize("twin", TWINS)
def test_a_doubled_output_doubles_it(twin: str, tmp_path: Path):
    before = mini_saliency(twin).saliency()[ROW]
    twice = {moe_name(LAYER, "experts.3.w2.weight_scale"): lambda exponent: exponent + 1}
    found = saliency_of(twin, tmp_path, twice)
    assert found[3] == 2 * before[3] > 0
    np.testing.assert_array_equal(np.delete(found, 3), np.delete(before, 3))


@pytest.mark.parametrize("twin", TWINS)
def test_tokens_are_the_denominator(twin: str):
    """The same sequences twice give the same saliency, and mass over tokens is what is called saliency."""
    item = entry("mini")
    domains = two_domains(item)
    once = mini_saliency(twin)
    doubled = streamed(twin, cached(item), {name: [*rows, *rows] for name, rows in domains.items()})
    assert doubled.tokens.tolist() == [120, 54]
    assert largest_difference(doubled.saliency(), once.saliency()) <= ALLOWED
    pooled = (once.tokens[:, None, None] * once.per_domain()).sum(0) / 87
    np.testing.assert_allclose(pooled, once.saliency(), rtol=1e-12)
    np.testing.assert_allclose(once.balanced(), once.per_domain().mean(0), rtol=1e-12)


@pytest.mark.parametrize("twin", TWINS)
def test_one_layer_and_one_expert_at_a_time(twin: str, monkeypatch: pytest.MonkeyPatch):
    """When a layer or an expert is read, the one before it is gone."""
    module, alive, most = importlib.import_module(f"{twin}.saliency"), {"layer": [], "expert": []}, {}

    def watched(kind: str):
        original = getattr(module.LayerReader, kind)

        def read(self, *args):
            found = original(self, *args)
            alive[kind].append(weakref.ref(found))
            most[kind] = max(most.get(kind, 0), sum(ref() is not None for ref in alive[kind]))
            return found

        return read

    for kind in alive:
        monkeypatch.setattr(module.LayerReader, kind, watched(kind))
    item = entry("mini")
    streamed(twin, cached(item), two_domains(item))
    assert most == {"layer": 1, "expert": 1}
    assert len(alive["layer"]) == 5 and len(alive["expert"]) > 20


def anonymous_bytes() -> int:
    """Memory of this process that is no file's: mapped shards do not count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


WIDE_LAYERS = 14
WIDE_TEXT = {
    "attn_res_block_size": None,
    "moe_intermediate_size": 512,
    "routed_expert_hidden_size": 512,
    "num_experts": 12,
    "num_hidden_layers": WIDE_LAYERS,
    "linear_attn_config": {"kda_layers": list(range(1, WIDE_LAYERS + 1)), "full_attn_layers": []},
}
EXPERT_BYTES = 12 * 3 * 512 * 512 * 4
"""The experts of one layer in float32."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("twin", TWINS)
def test_memory_does_not_grow_with_the_layers(twin: str, monkeypatch: pytest.MonkeyPatch):
    """14 layers of 38 MB of experts each; the most that is held in the last layers is what the third layer holds."""
    base = entry("dense-experts")
    item = Entry("wide-experts", merged(base.config, {"text_config": WIDE_TEXT}), "dense", shard_bytes=1 << 26)
    module = importlib.import_module(f"{twin}.saliency")
    seen, original = np.zeros(WIDE_LAYERS), module.LayerReader.expert

    def expert(self, layer: int, number: int):
        found = original(self, layer, number)
        seen[layer] = max(seen[layer], anonymous_bytes())
        return found

    monkeypatch.setattr(module.LayerReader, "expert", expert)
    streamed(twin, cached(item), two_domains(item))
    assert seen[3:].max() - seen[3] < EXPERT_BYTES / 4
    assert seen[3:].min() > 0


def test_a_file_gives_back_what_was_saved(tmp_path: Path):
    item = entry("mini")
    found = mini_saliency("port")
    found.save(tmp_path / "a.npz")
    found.save(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a.npz", "b.npz"}
    again = load_saliency(tmp_path / "a.npz")
    assert again.domains == found.domains and again.config == item.parsed
    for name in ("tokens", "layers", "mass", "counts"):
        np.testing.assert_array_equal(getattr(again, name), getattr(found, name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mass": np.full((2, 4, 8), np.nan)}, "mass: expected finite numbers"),
        ({"mass": np.zeros((2, 4, 7))}, "mass: expected floating"),
        ({"counts": np.zeros((2, 4, 8))}, "counts: expected integer"),
        ({"layers": np.array([0, 1, 2, 3])}, "layers: expected the MoE layers"),
        ({"tokens": np.array([0, 3])}, "domains: expected different names, each with tokens"),
        ({"domains": np.array(["a", "a"])}, "domains: expected different names"),
        ({"config": "{}"}, "config"),
        ({"format": np.array(9)}, "format: expected 1, found 9"),
    ],
)
def test_files_that_are_none(change: dict, message: str, tmp_path: Path):
    file = tmp_path / "s.npz"
    mini_saliency("port").save(file)
    with np.load(file) as saved:
        fields = dict(saved)
    np.savez(file, **(fields | change))
    with pytest.raises(InputError, match=message) as caught:
        load_saliency(file)
    assert str(file) in str(caught.value)


def test_no_file_and_half_a_file(tmp_path: Path):
    with pytest.raises(InputError, match="nothing there"):
        load_saliency(tmp_path / "none.npz")
    (tmp_path / "half.npz").write_bytes(b"PK\x03\x04 half")
    with pytest.raises(InputError, match="an .npz file of a calibration"):
        load_saliency(tmp_path / "half.npz")


@pytest.mark.parametrize("twin", TWINS)
def test_calibration_sets_that_are_none(twin: str):
    folder = cached(entry("mini"))
    for domains, message in (
        ({}, "at least one"),
        ({"a": []}, "domain a: expected at least one token"),
        ({"a": [np.array([320])]}, "ids in"),
        ({"a": [np.array([-1])]}, "ids in"),
    ):
        with pytest.raises(InputError, match=message):
            streamed(twin, folder, domains)
    with pytest.raises(InputError, match="dtype"):
        streamed(twin, folder, {"a": [np.array([1])]}, dtype="int4")


def test_pieces_hold_every_sequence_once():
    assert pieces([3, 4, 5, 100, 1], 8) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    assert pieces([], 8) == []
