"""The MLX port split over ranks gives what it gives whole; each tensor is read once (K3.md §6, §7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from fixtures.build import cached
from fixtures.catalogue import entry
from parity.checks import Plan
from parity.checks.plan import case_named
from parity.exits import EXIT_NOTHING
from parity.metrics import relative_rms
from parity.ports import load_port
from parity.ports.loopback import Ranks, Stopped
from parity.ports.ring import Request, answers
from parity.ports.split import RankSession, Split, SplitSession, merged
from parity.protocol import Step, Taps, Unsupported
from parity.routing import MARGIN
from parity.runner import run_checks
from parity.tests.tampering import Folder, converted
from port.expert_split import load_share
from port.pipeline import load_stage
from reference.errors import InputError
from reference.shards import Shards

ALLOWED = 1e-5
LAYERS = 25
"""Of the catalogue's ``long``, whose blocks are of 12 layers."""


def steps_for(name: str, batch: int = 1, pieces: Sequence[int] = (5, 1, 1)) -> list[Step]:
    """A prefill and decode steps over random ids."""
    vocab = entry(name).parsed.text_config.vocab_size
    ids = np.random.default_rng(len(name)).integers(0, vocab, (batch, sum(pieces)))
    return [Step(input_ids=part) for part in np.split(ids, np.cumsum(pieces)[:-1], axis=1)]


def run(port: str, name: str, steps: Sequence[Step], dtype: str = "float32") -> list[Taps]:
    return load_port(port).open(cached(entry(name)), dtype).run(steps)


def worst(found: Sequence[Taps], right: Sequence[Taps]) -> float:
    """The largest relative RMS over all steps and taps; the taps must be the same ones.

    Not the router's margin, which the harness judges nowhere: a difference of two scores that may be almost equal.
    """
    assert [taps.keys() for taps in found] == [taps.keys() for taps in right]
    judged = [(a[name], b[name]) for a, b in zip(found, right, strict=True) for name in b if not name.endswith(MARGIN)]
    return max(relative_rms(one, other) for one, other in judged)


@pytest.fixture(scope="module")
def long_whole() -> list[Taps]:
    return run("mlx", "long", steps_for("long", 1, (4, 1)))


@pytest.mark.parametrize("cut", range(13))
def test_cut_before_every_layer(cut: int, long_whole):
    """Three ranks, prefill and decode: the cuts before ``cut`` and 13 layers on take every place from 0 to 25."""
    assert worst(run(f"pipeline:cut={cut},{cut + 13}", "long", steps_for("long", 1, (4, 1))), long_whole) <= ALLOWED


@pytest.mark.parametrize("name", ["every-layer", "plain-residual", "dense-experts", "kimi-linear", "all-mla"])
def test_other_configurations(name: str):
    steps = steps_for(name, batch=2)
    assert worst(run("pipeline:3", name, steps), run("mlx", name, steps)) <= ALLOWED


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_without_layers_pass_on_what_they_get(dtype: str):
    steps = steps_for("mini")
    assert worst(run("pipeline:8", "mini", steps, dtype), run("mlx", "mini", steps, dtype)) <= ALLOWED


@pytest.mark.parametrize("name", ["mini", "groups", "dense-experts", "no-latent-norm"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_experts_shared_out(name: str, ranks: int):
    steps = steps_for(name, batch=2)
    assert worst(run(f"pipeline:experts={ranks}", name, steps), run("mlx", name, steps)) <= ALLOWED


def test_padding_is_known_on_every_rank():
    """Left padding longer than the first piece of the prompt, and NaN in its embeddings."""
    whole = load_port("mlx").open(cached(entry("mini")), "float32")
    embeddings = whole.run(steps_for("mini", 2, [8]))[0]["language_model.model.embed_tokens.output"].copy()
    mask = np.ones((2, 8), bool)
    mask[1, :5] = False
    embeddings[~mask] = np.nan
    pieces = slice(0, 3), slice(3, 7), slice(7, 8)
    steps = [Step(inputs_embeds=embeddings[:, piece], mask=mask[:, piece]) for piece in pieces]
    for port in ("pipeline:2", "pipeline:experts=2"):
        found = run(port, "mini", steps)
        assert all(np.isfinite(taps["logits"]).all() for taps in found)
        assert worst(found, whole.run(steps)) <= ALLOWED


@pytest.mark.parametrize("port", ["pipeline:2", "pipeline:experts=2"])
def test_the_same_checks_as_for_any_port(port: str):
    plan = Plan(load_port(port), (case_named("mini"),), ("float32",), 0)
    report = run_checks(plan, ["end_to_end", "decode", "layers"])
    assert report.exit_code == 0 and not report.failures
    assert Counter(finding.status for finding in report.findings)["pass"] > 500


def test_a_stage_reads_its_own_tensors_and_caches_its_own_layers(monkeypatch):
    reads, read = Counter(), Shards.read
    monkeypatch.setattr(Shards, "read", lambda self, name: reads.update([name]) or read(self, name))
    folder = cached(entry("long"))
    session = SplitSession(Split.parsed("3"), folder, "float32")
    text = {name for name in Shards(folder).names if name.startswith("language_model.")}
    assert reads == Counter(text)
    assert sum((Counter(part.read) for part in session.sessions), Counter()) == reads
    for part in session.sessions:
        assert len(part.new_cache(1).layers) == len(part.model.layers)


def test_an_expert_is_read_by_one_rank_and_all_else_by_every_rank(monkeypatch):
    reads, read = Counter(), Shards.read
    monkeypatch.setattr(Shards, "read", lambda self, name: reads.update([name]) or read(self, name))
    SplitSession(Split.parsed("experts=3"), cached(entry("mini")), "float32")
    assert {count for name, count in reads.items() if ".experts." in name} == {1}
    assert {count for name, count in reads.items() if ".experts." not in name} == {3}
    experts = entry("mini").parsed.text_config.num_experts
    assert {int(name.split(".experts.")[1].split(".")[0]) for name in reads if ".experts." in name} == set(
        range(experts)
    )


@pytest.mark.parametrize(
    "text", ["", "0", "x", "cut=", "cut=3,x", "experts=2,3", "shards=2", "-1", "cut=-1", "cut=9,8", "9999"]
)
def test_a_split_that_cannot_be_is_refused(text: str):
    with pytest.raises(InputError, match="--port: split"):
        load_port(f"pipeline:{text}")


@pytest.mark.parametrize("text", ["cut=3,26", "experts=5"])
def test_what_a_checkpoint_is_too_small_for_is_unsupported(text: str):
    with pytest.raises(Unsupported, match="25 layers cannot be cut before layer 26|4 experts cannot be shared"):
        load_port(f"pipeline:{text}").open(cached(entry("long")), "float32")
    report = run_checks(Plan(load_port(f"pipeline:{text}"), (case_named("long"),), ("float32",), 0), ["end_to_end"])
    assert report.exit_code == EXIT_NOTHING


def test_what_a_rank_cannot_load_is_one_line(tmp_path):
    """The port's own loaders, by themselves."""
    [end] = Ranks(1).ends
    folder = cached(entry("mini"))
    with pytest.raises(InputError, match="cuts: number: expected 0 for 1 ranks, found 1"):
        load_stage(folder, "float32", end, [2])
    for load in (load_stage, load_share):
        with pytest.raises(InputError, match="dtype: expected float32 or bfloat16"):
            load(folder, "float64", end)
    converted(tmp_path / "out", "mxfp4")
    with pytest.raises(InputError, match="expected a checkpoint in the released format"):
        load_stage(tmp_path / "out", "float32", end)
    with pytest.raises(InputError, match="at least 2 ranks"):
        load_port("ring:1")


def test_inputs_that_do_not_fit_stop_every_rank():
    with pytest.raises(InputError, match="token id"):
        run("pipeline:3", "mini", [Step(input_ids=np.array([[10**6]]))])


def test_ranks_that_wait_for_nothing_are_told():
    ranks = Ranks(2)
    import mlx.core as mx

    with pytest.raises(Stopped):
        ranks.each(lambda rank: ranks.ends[rank].receive((1,), mx.float32, 1 - rank))
    with pytest.raises(ZeroDivisionError):
        ranks.each(lambda rank: ranks.ends[0].receive((1,), mx.float32, 1) if rank == 0 else 1 // 0)


def test_ranks_that_disagree_have_no_answer():
    left, right = {"a": np.array([1.0, 2.0]), "b": np.array([3, 4])}, {"a": np.array([1.0, 2.5]), "b": np.array([3, 5])}
    both = merged(Split.parsed("experts=2"), [[left], [right]])[0]
    assert np.array_equal(both["a"], [1.0, np.nan], equal_nan=True) and both["b"].tolist() == [3, -1]
    with pytest.raises(RuntimeError, match="computed twice"):
        merged(Split.parsed("2"), [[left], [right]])


# Real processes


def through_processes(splits: Sequence[str], ranks: int, name: str, dtype: str = "float32") -> None:
    """Every split in one launch, against the whole port: prefill and two decode steps, every tap; tensors read once."""
    folder, steps = cached(entry(name)).resolve(), tuple(steps_for(name, batch=2))
    whole = run("mlx", name, steps, dtype)
    for split, (taps, read) in zip(splits, answers(Request(folder, dtype, tuple(splits), steps), ranks), strict=True):
        assert worst(merged(Split.parsed(split), taps), whole) <= ALLOWED, split
        names = Counter(name for part in read for name in part)
        assert {count for name, count in names.items() if ".experts." in name} == {1}
        if not split.startswith("experts"):
            assert set(names.values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_processes_cut_before_every_layer(dtype: str):
    through_processes([f"cut={cut}" for cut in range(LAYERS + 1)], 2, "long", dtype)


@pytest.mark.slow
def test_three_processes_cut_before_every_layer():
    splits = [f"cut={cut},{min(LAYERS, cut + 1 + cut % 8)}" for cut in range(LAYERS + 1)]
    through_processes(splits, 3, "long")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_that_share_experts(ranks: int):
    through_processes([f"experts={ranks}"], ranks, "groups")


@pytest.mark.slow
def test_a_process_that_fails_is_heard():
    with pytest.raises(RuntimeError, match="rank .: InputError: .*token id"):
        run("ring:2", "mini", [Step(input_ids=np.array([[10**6]]))])


@pytest.mark.slow
def test_a_rank_that_fails_alone_ends_the_others(tmp_path):
    """A tensor of the first rank's holds a NaN; the second one waits for a state that never comes."""
    folder = Folder(cached(entry("mini")), tmp_path / "bad")
    folder.array("language_model.model.layers.0.self_attn.dt_bias")[0] = np.nan
    session = load_port("ring:2").open(folder.path, "float32")
    with pytest.raises(RuntimeError, match="^rank 0: InputError: .*dt_bias: expected finite numbers"):
        session.run(steps_for("mini"))


def test_a_rank_alone_is_the_whole_port():
    ranks = Ranks(1)
    [session] = ranks.each(
        lambda rank: RankSession(Split.parsed("1"), cached(entry("mini")), "float32", ranks.ends[rank])
    )
    steps = steps_for("mini")
    [found] = ranks.each(lambda rank: session.run(steps))
    assert worst(found, run("mlx", "mini", steps)) == 0
