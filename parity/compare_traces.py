"""Comparing a trace with a golden one, tap by tap, whole passes (chained).

float32: every tap within 2e-4 of the golden trace. Where a tap is beyond that and the golden checkpoint is at hand,
float64 decides: rounding may be amplified on some token, or a tie broken the other way. Then the trace must be within
2e-4, or within twice the reference's own float32 error, of the float64 reference with the trace's routing imposed.
bfloat16: error against float64 at most twice the reference's own bfloat16 error, both measured on the checkpoint, with
the trace's own routing imposed where it differs by a tie only. Without a checkpoint the golden folder's float32 trace
stands for the truth and the golden bfloat16 trace for the noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parity.arrays import stored_dtype
from parity.compare import Place, choice_finding
from parity.findings import Finding, measure
from parity.metrics import relative_rms
from parity.protocol import Taps
from parity.quantities import LAYER, Quantity, computed_order, quantity
from parity.routing import INDICES, SCORES, Choice, compare_choice, own_choice
from parity.tolerance import CHAINED, GOLDEN_AMPLIFIED_FLOAT32, GOLDEN_CHAINED_FLOAT32, GOLDEN_VISION_FLOAT32
from parity.trace import load_trace, unsupported_runs
from parity.tracing import load_inputs, routing_of, trace_port
from reference.config import K3Config, TextConfig
from reference.errors import InputError

PARTS = {"text": ("prefill", "decode", "padded"), "vision": ("vision",), "multimodal": ("mm",)}


@dataclass(frozen=True)
class Yardstick:
    """What a trace is measured with: the truth, the noise, and the masks of padded runs; by full tap name."""

    truth: Taps
    noise: Taps
    masks: Mapping[str, np.ndarray]
    text: TextConfig | None
    measured: bool
    origin: str

    def real(self, tap: str, array: np.ndarray) -> np.ndarray:
        """Only real positions of a padded run mean anything."""
        run, _, name = tap.partition("/")
        mask = self.masks.get(run)
        if mask is None or name.endswith("self_attn.state"):
            return array
        if array.shape[:2] == mask.shape:
            return array[mask]
        return array[mask.reshape(-1)] if array.shape[0] == mask.size else array


def trace_findings(
    case: str, dtype: str, found: Taps, metadata: Mapping[str, str], golden: Taps, yardstick: Yardstick
) -> Iterator[Finding]:
    """One finding per tap of ``golden``; a run that the trace's port cannot do is counted as unsupported."""
    left_out = unsupported_runs(metadata)
    failed_runs: set[str] = set()
    for tap in sorted(golden, key=lambda name: _order(yardstick.text, name)):
        run, _, name = tap.partition("/")
        place, what = Place("golden", case, dtype, run, isolated=False), _quantity(yardstick.text, name)
        if run in left_out:
            yield place.finding(what, tap, "unsupported", note=f"this port has no run {run!r}")
            continue
        finding = _tap_finding(place, what, tap, dtype, found, golden, yardstick)
        yield finding.model_copy(update={"inputs_agree": run not in failed_runs})
        if finding.status == "fail":
            failed_runs.add(run)


def _tap_finding(place, what, tap, dtype, found, golden, yardstick) -> Finding:
    if tap not in found:
        return place.finding(what, tap, "fail", note="this tap is missing")
    if found[tap].shape != golden[tap].shape:
        return place.finding(what, tap, "fail", **measure(found[tap], golden[tap]))
    if tap.endswith(INDICES):
        return choice_finding(place, what, tap, _choice(tap, found, golden, yardstick))
    if np.issubdtype(golden[tap].dtype, np.integer):
        return _judged(place, what, tap, found[tap], golden[tap], 0.0, None)
    port, gold = (yardstick.real(tap, side[tap]) for side in (found, golden))
    if dtype == "float32":
        rerouted = not _same_routing(tap, found, golden)
        return _float32(place, what, tap, port, gold, yardstick, rerouted)
    if tap not in yardstick.truth:
        return place.finding(what, tap, "fail", note="the truth has no such tap to measure with")
    true, near = (yardstick.real(tap, side[tap]) for side in (yardstick.truth, yardstick.noise))
    noise = relative_rms(near, true)
    return _judged(place, what, tap, port, true, CHAINED.allowed(dtype, noise, stored_dtype(near)), noise)


def _float32(place, what, tap, port, gold, yardstick, rerouted: bool) -> Finding:
    """By the golden trace; beyond its limit by float64, but only where golden is near float64 too, or a tie was broken
    the other way: the reference must not overrule the authors' own result."""
    picture = what.module.startswith(("vision", "projector", "merge"))
    limit = GOLDEN_VISION_FLOAT32 if picture else GOLDEN_CHAINED_FLOAT32
    finding = _judged(place, what, tap, port, gold, limit, None)
    if finding.status == "pass" or picture or not yardstick.measured or tap not in yardstick.truth:
        return finding
    true, near = (yardstick.real(tap, side[tap]) for side in (yardstick.truth, yardstick.noise))
    own, noise = relative_rms(gold, true), relative_rms(near, true)
    if own > GOLDEN_AMPLIFIED_FLOAT32 and not rerouted:
        return finding
    allowed = max(limit, CHAINED.factor["bfloat16"] * noise)
    note = f"by float64: the golden trace itself is {own:.2g} from it here"
    return _judged(place, what, tap, port, true, allowed, noise).model_copy(update={"note": note})


def _same_routing(tap: str, found: Taps, golden: Taps) -> bool:
    """Whether all routers of this tap's run chose as the golden ones did, as far as both show it."""
    run = tap.partition("/")[0] + "/"
    shown = [name for name in golden if name.startswith(run) and name.endswith(INDICES) and name in found]
    return all(np.array_equal(np.sort(found[name]), np.sort(golden[name])) for name in shown)


def _judged(place, what, tap, port, true, allowed, noise) -> Finding:
    result = measure(port, true)
    status = "pass" if result["error"] <= allowed else "fail"
    return place.finding(what, tap, status, allowed=allowed, noise=noise, **result)


def _choice(tap: str, found: Taps, golden: Taps, yardstick: Yardstick) -> Choice:
    """By the measured margin where there is one; without it any other choice than the golden one is wrong."""
    if yardstick.measured and tap in yardstick.truth:
        return compare_choice(found[tap], yardstick.truth, yardstick.noise, tap)
    differs = (np.sort(found[tap]) != np.sort(golden[tap])).any(axis=-1)
    return Choice(np.flatnonzero(differs), np.zeros(0, int), np.full(differs.shape, np.nan), 0.0, ~differs)


def _quantity(text: TextConfig | None, name: str) -> Quantity:
    if text is not None:
        try:
            return quantity(text, name)
        except KeyError:
            return Quantity(name.rpartition(".")[0].rpartition(".")[2] or name, "§9", 0)
    match = LAYER.match(name)
    return Quantity((match[2] if match else name).partition(".")[0], "", 0)


def _order(text: TextConfig | None, tap: str) -> tuple:
    run, _, name = tap.partition("/")
    if text is not None:
        try:
            return run, *computed_order(text, name)
        except (KeyError, ValueError):
            return run, 0, 0, 0
    layer = LAYER.match(name)
    return run, int(layer[1]) if layer else 10**6, 0, 0


def yardstick_for(golden_file: Path, dtype: str, found: Taps, checkpoint: Path | None) -> Yardstick:
    """Measured on the checkpoint (given, or beside the golden file) where there is one, else from the sibling trace."""
    folder = checkpoint or (golden_file.parent if (golden_file.parent / "config.json").is_file() else None)
    inputs_file = golden_file.parent / "inputs.safetensors"
    if folder is not None and inputs_file.is_file():
        return measured_yardstick(folder, inputs_file, dtype, found)
    if dtype == "float32":
        return Yardstick({}, {}, {}, None, False, "the golden trace alone")
    sibling = golden_file.with_name("trace-float32.safetensors")
    if not sibling.is_file():
        mend = "give --checkpoint, or keep the float32 trace beside the bfloat16 one"
        raise InputError(golden_file, "truth", "a checkpoint or trace-float32.safetensors beside it", "neither", mend)
    return Yardstick(
        load_trace(sibling)[0], load_trace(golden_file)[0], {}, None, False, f"the truth is {sibling.name}"
    )


def measured_yardstick(checkpoint: Path, inputs_file: Path, dtype: str, found: Taps) -> Yardstick:
    """The reference in float64 and in ``dtype`` over the same inputs, with the trace's own routing imposed."""
    from parity.sides import reference_port

    inputs = load_inputs(inputs_file)
    reference, text = reference_port(), K3Config.from_file(checkpoint).text_config
    truth, _ = trace_port(reference, checkpoint, inputs, "float64", legal_routing(found, text))
    noise, _ = trace_port(reference, checkpoint, inputs, dtype, legal_routing(found, text))
    for name in routing_of(truth):
        scores = truth[name.removesuffix(INDICES) + SCORES]
        truth[name] = own_choice(scores, text.num_experts_per_token)
    masks = {"padded": inputs["padded.attention_mask"].astype(bool)} if "padded.attention_mask" in inputs else {}
    if "mm/attention_mask" in truth:
        masks["mm"] = truth["mm/attention_mask"].astype(bool)
    return Yardstick(truth, noise, masks, text, True, "the reference in float64, measured on the checkpoint")


def legal_routing(found: Taps, text: TextConfig) -> Taps:
    """The choices of a trace that can be imposed at all; one with others fails at that router, by its margin."""
    return {
        name: array.astype(np.int64)
        for name, array in routing_of(found).items()
        if array.ndim == 2
        and array.shape[1] == text.num_experts_per_token
        and 0 <= array.min() <= array.max() < text.num_experts
    }
