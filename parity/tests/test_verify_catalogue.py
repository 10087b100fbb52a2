"""No false alarm: every configuration, tier and plan converts to what verify accepts, whoever compares (K3.md §15)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.build import cached
from fixtures.catalogue import CATALOGUE, Entry, entry
from fixtures.widened import widened
from parity.requantization import released_looking
from parity.tests.test_convert_workers import scheduler  # noqa: F401 - a fixture
from parity.tests.test_prune import plan_of
from parity.verify import declared
from parity.verify.declared import BANDS, PROMISES
from parity.verify.decode import mxfp4
from parity.verify.measure import affine_block
from parity.verify.run import verify
from port.convert import convert
from port.requantize import dequantize_mxfp4, quantize
from port.tiers import Format, outputs, tier_named

KINDS = list(PROMISES)
QUICK = list(CATALOGUE)


def accepted(item: Entry, tier: str, nonexpert_bits: int | None, pruned: bool, folder: Path, **more) -> None:
    source, plan = cached(item), None
    if pruned:
        softmax = item.parsed.text_config.moe_router_activation_func == "softmax"
        plan = plan_of(item.parsed, 3, drop=0 if softmax else 2)
    convert(source, folder, tier, nonexpert_bits, plan, sync=False)
    verdict = verify(folder, source, plan=plan, **more)
    assert not verdict.problems, verdict.problems[0].line()
    assert verdict.exit_code == 0 and verdict.pruned == pruned
    assert len(verdict.experts) == verdict.total_experts


@pytest.mark.parametrize("name", QUICK)
def test_a_conversion_of_every_configuration_is_accepted(name: str, tmp_path: Path):
    """Each in one way, ways taking turns; all of them under the marker slow."""
    place = QUICK.index(name)
    item, (tier, bits) = widened(entry(name)), KINDS[place % len(KINDS)]
    if item.expert_format == "dense" and tier == "mxfp4":
        tier = "mixed2"
    accepted(item, tier, bits, place // len(KINDS) % 2 == 1, tmp_path / "out")


PACKED = [name for name, item in CATALOGUE.items() if item.expert_format == "mxfp4"]
EVERY = [
    (name, *kind, pruned)
    for name in CATALOGUE
    for kind in KINDS
    for pruned in (False, True)
    if name in PACKED or kind[0] != "mxfp4"
]
"""Tier mxfp4 copies bytes, which dense experts have not."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tier", "bits", "pruned"), EVERY)
def test_every_conversion_is_accepted(name: str, tier: str, bits: int | None, pruned: bool, tmp_path: Path):
    accepted(widened(entry(name)), tier, bits, pruned, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKED)
def test_narrow_ones_too_as_far_as_mxfp4_goes(name: str, tmp_path: Path):
    """The catalogue as it is: what no group divides stays bf16."""
    accepted(entry(name), "mxfp4", 8, False, tmp_path / "out")


@pytest.mark.parametrize("name", CATALOGUE)
def test_two_declarations_of_every_tier_agree(name: str):
    """What the converter says that a tier holds, and what verify says."""
    item = widened(entry(name))
    for (tier, bits), promise in PROMISES.items():
        if item.expert_format == "dense" and tier == "mxfp4":
            continue
        plan = {layer: tuple(kept) for layer, kept in plan_of(item.parsed, 1).items()}
        theirs = outputs(item.parsed, item.expert_format, tier_named(tier, bits), plan)
        mine = declared.entries(item.parsed, item.expert_format, promise, plan)
        expected = {name: pair for one in mine for name, pair in one.tensors().items()}
        assert {t.name: (t.dtype, t.shape) for output in theirs for t in output.tensors} == expected


@pytest.mark.parametrize("bits", BANDS)
def test_released_looking_weights_lie_in_the_bands(bits: int):
    low, high = BANDS[bits]
    for seed in range(3):
        packed, scale = released_looking(seed)
        coded = quantize(dequantize_mxfp4(packed, scale), Format("affine", bits, 64))
        measure = affine_block(mxfp4(packed, scale), *coded, bits)
        assert low < measure.error < high and (measure.grids, measure.codes) == (0, 0)


def test_two_workers_see_the_same(tmp_path: Path):
    convert(cached(entry("quantizable")), tmp_path / "out", "3bit", sync=False)
    one, two = (verify(tmp_path / "out", cached(entry("quantizable")), workers=count) for count in (1, 2))
    assert (one.experts, one.tensors, one.problems) == (two.experts, two.tensors, [])


@pytest.mark.slow
def test_a_dask_cluster_sees_the_same(scheduler: Iterator[str], tmp_path: Path):  # noqa: F811
    source = cached(entry("quantizable"))
    convert(source, tmp_path / "out", "2bit", sync=False)
    one, many = (verify(tmp_path / "out", source, scheduler=address) for address in (None, scheduler))
    assert (one.experts, one.tensors, one.problems) == (many.experts, many.tensors, [])
    (tmp_path / "out" / "model-00001-of-00001.safetensors").unlink()
    assert verify(tmp_path / "out", source, scheduler=scheduler).exit_code == 1


def test_progress_ends_where_it_should(tmp_path: Path):
    convert(cached(entry("mini")), tmp_path / "out", "mxfp4", sync=False)
    seen: list[tuple[int, int]] = []
    verify(tmp_path / "out", cached(entry("mini")), progress=lambda done, total: seen.append((done, total)))
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] and seen == sorted(seen)
