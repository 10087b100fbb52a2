"""Changes that are not faults. None of them may be reported (the changes themselves: benign_changes.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import starmap
from multiprocessing import get_context
from typing import NamedTuple

from parity.benign_changes import (
    absorbed,
    attention_by_head,
    attention_in_float32,
    both_forms,
    channels_in_two_groups,
    contiguous,
    each_head_alone,
    each_row_alone,
    each_sequence_alone,
    each_token_alone,
    experts_one_after_another,
    experts_sorted_by_token,
    features_in_two_parts,
    frames_in_the_other_order,
    from_the_other_end,
    gate_by_exponential,
    gelu_by_sigmoid,
    heads_of_the_tower_alone,
    in_two_calls,
    in_two_parts,
    last_of_equals,
    last_patch_first,
    length_by_division,
    linear,
    mix_divided_last,
    mix_the_other_way,
    newest_key_first,
    newest_tap_first,
    norm_by_division,
    norm_from_the_other_end,
    output_norm_by_head,
    outputs_in_two_parts,
    scaled_before_divided,
    situ_compiled,
    situ_up_first,
    softmax_in_steps,
    strength_by_exponential,
    token_by_token,
    unpacked,
    weighted_before_down,
)
from parity.checks import CHECKS, Plan
from parity.checks.plan import case_named
from parity.fault_catalogue.patches import around, given
from parity.faults import Fault, FaultyPort
from parity.findings import Finding
from parity.kill_matrix import BY_MODULE
from parity.ports import load_port

WRONG = ("fail", "error")
TEXT = ("modules", "layers", "end_to_end", "decode")
LISTED = (
    ("mlp", "every product in two parts over its inputs", linear(in_two_parts)),
    ("mlp", "every product summed from the other end", linear(from_the_other_end)),
    ("mlp", "every product in float32, rounded once", linear(lambda x, W: x @ W.T)),
    ("mlp", "every product in two parts over its outputs", {"linear.Linear.forward": around(outputs_in_two_parts)}),
    ("mlp", "every product row by row", {"linear.Linear.forward": around(each_row_alone)}),
    ("norm", "the norm divides by a root", {"norm.rms_norm": around(norm_by_division)}),
    ("norm", "the norm sums from the other end", {"norm.rms_norm": around(norm_from_the_other_end)}),
    ("activation", "SiTU multiplies in another order", {"activation.situ_glu": around(situ_up_first)}),
    ("activation", "SiTU is compiled", {"activation.situ_glu": around(situ_compiled)}),
    ("short_conv", "the convolution adds its newest tap first", {"short_conv.short_conv": around(newest_tap_first)}),
    ("short_conv", "the convolution in two groups", {"short_conv.short_conv": around(channels_in_two_groups)}),
    ("kda.recurrence", "chunks of 8 tokens", {"kda_chunk.chunked_kda": given(chunk_size=8)}),
    ("kda.recurrence", "chunks of 16 tokens", {"kda_chunk.chunked_kda": given(chunk_size=16)}),
    ("kda.recurrence", "chunks of 128 tokens", {"kda_chunk.chunked_kda": given(chunk_size=128)}),
    ("kda.recurrence", "the recurrence in place of chunks", {"kda_chunk.chunked_kda": around(token_by_token)}),
    ("kda.recurrence", "each head alone", both_forms(each_head_alone)),
    ("kda.recurrence", "each sequence alone", both_forms(each_sequence_alone)),
    ("kda.recurrence", "tokens in two calls, the state handed over", both_forms(in_two_calls)),
    ("kda.gate", "the gate's sigmoid by its exponential", {"kda.log_decay": around(gate_by_exponential)}),
    ("kda.gate", "β by its exponential", {"kda.write_strength": around(strength_by_exponential)}),
    ("kda.recurrence", "keys are divided by a root", {"kda.l2_normalize": around(length_by_division)}),
    ("kda.output", "the gated norm head by head", {"kda.gated_output_norm": around(output_norm_by_head)}),
    ("mla.attention", "W_kvb is absorbed", {"mla.GatedMLA.attend": around(absorbed)}),
    ("mla.attention", "softmax in steps", {"mla.attention_weights": around(softmax_in_steps)}),
    ("mla.attention", "each head alone, in MLA", {"mla.attention": around(attention_by_head)}),
    ("mla.attention", "the newest key first", {"mla.attention": around(newest_key_first)}),
    ("mla.attention", "scores and weights in float32", {"mla.attention": around(attention_in_float32)}),
    ("mla.attention", "contiguous copies", {"mla.attention": around(contiguous)}),
    ("attn_res", "the mix is divided last", {"attn_res.mix": around(mix_divided_last)}),
    ("attn_res", "the mix in the opposite order", {"attn_res.mix": around(mix_the_other_way)}),
    ("router", "ties are broken the other way", {"moe.select_experts": around(last_of_equals)}),
    ("router", "weights are scaled before they are divided", {"moe.routing_weights": around(scaled_before_divided)}),
    ("experts", "experts added one after another", {"moe.Experts.forward": around(experts_one_after_another)}),
    ("experts", "tokens sorted by expert", {"moe.Experts.forward": around(experts_sorted_by_token)}),
    ("experts", "each token alone", {"moe.Experts.forward": around(each_token_alone)}),
    ("experts", "weights before the down projection", {"moe.Experts.forward": around(weighted_before_down)}),
    ("experts", "experts unpacked to float32", {"mxfp4.gather_matmul": around(unpacked)}),
    ("vision.attention", "each head of the tower alone", {"vision.item_attention": around(heads_of_the_tower_alone)}),
    ("vision.attention", "the last patch first", {"vision.item_attention": around(last_patch_first)}),
    ("vision.block", "GELU by a sigmoid", {"vision.gelu_tanh": around(gelu_by_sigmoid)}),
    ("vision.merge", "frames in the other order", {"vision.temporal_mean": around(frames_in_the_other_order)}),
    ("projector", "the projector in two parts", {"projector.Projector.forward": around(features_in_two_parts)}),
)
"""(module, what is done otherwise, patches)"""
BENIGN = tuple(
    Fault(f"B{number:02}", module, says, "", patches) for number, (module, says, patches) in enumerate(LISTED, start=1)
)


class Verdict(NamedTuple):
    """What was said of one change in one dtype with one seed; ``reports`` is empty if the checks are right."""

    change: str
    claim: str
    dtype: str
    seed: int
    reports: tuple[str, ...]


def judged(id: str, dtype: str, seed: int) -> Verdict:
    """Run the checks on the MLX port with this change in it."""
    item = next(item for item in BENIGN if item.id == id)
    plan = Plan(FaultyPort(load_port("mlx"), "port", [item]), (case_named("mini", seed),), (dtype,), seed)
    wrong = [f for check in BY_MODULE.get(item.module, TEXT) for f in CHECKS[check](plan) if f.status in WRONG]
    return Verdict(id, item.claim, dtype, seed, tuple(said(finding) for finding in wrong))


def said(finding: Finding) -> str:
    return f"{finding.check} {finding.module} {finding.tap} {finding.regime}: {finding.error} > {finding.allowed}"


def all_judged(seeds: Sequence[int], dtypes: Sequence[str], workers: int = 1) -> Iterator[Verdict]:
    """Every change with every seed and dtype; a process keeps to its seeds, so that the truth is computed once each."""
    tasks = [(item.id, dtype, seed) for seed in seeds for dtype in dtypes for item in BENIGN]
    if workers == 1:
        yield from starmap(judged, tasks)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        yield from pool.map(judged, *zip(*tasks, strict=True), chunksize=len(BENIGN) * len(dtypes))
