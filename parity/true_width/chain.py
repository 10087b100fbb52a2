"""The whole text tower streamed through both twins: one layer in memory at a time, each side on its own chain.

A layer is read once and used for all: the prompt, then every decode step, in each twin, over that layer's own cache.
What stays are prefix sums and block banks, a few megabytes, written down after each layer so that a run can go on
where it was stopped. The first layers are also carried in float64. Where a router is tied, the reference's float32
choice is imposed on every side, and counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from parity.findings import Finding, measure
from parity.protocol import Taps
from parity.quantities import quantity
from parity.routing import INDICES, MARGIN, SCORES, compare_choice
from parity.tolerance import CHAINED, FLOOR
from parity.true_width.cost import peak_rss
from parity.true_width.ends import ends_of, head
from parity.true_width.isolated import compared
from parity.true_width.partial import located
from parity.true_width.session import Position, joined
from parity.true_width.sides import LayerSides, Run
from parity.true_width.source import Missing, layer_specs
from parity.true_width.state import State
from parity.true_width.weights import missing
from reference.checkpoint import LAYERS

APART = 2e-4
"""Relative RMS that two float32 chains may be apart at any layer: what the authors' own float32 pass is allowed."""
WIDE, WIDE_FACTOR = 4096, 2.0
"""Where float64 is carried along and there are so many channels, the port may be so many times as far from it as the
reference's float32 is: over thousands of channels two right programs draw the same error. Over fewer: as any chain."""
SHOWN = ("self_attn.input", "self_attn.output", "mlp.input", "mlp.output", "output")
EMBEDDING, NORM = "language_model.model.embed_tokens.output", "language_model.model.norm.output"
ROUTED = (SCORES, "router.weights", "moe.routed")


@dataclass(frozen=True)
class Plan:
    """``decode`` steps of one token after the prompt; float64 is carried through the first ``truth_layers``."""

    decode: int = 2
    truth_layers: int = 4


class Chain:
    """A chained run; ``state`` holds every side's positions before the next layer, and the findings so far."""

    def __init__(self, run: Run, plan: Plan, state: State) -> None:
        self.run, self.plan, self.state = run, plan, state

    def findings(self) -> Iterator[Finding]:
        """All findings of the run, those that were written down first; where something is missing the chain ends."""
        yield from self.state.findings
        try:
            yield from self._steps()
        except Missing as missed:
            yield self._stopped(f"{missed.subject} is not there")

    def _steps(self) -> Iterator[Finding]:
        if not self.state.positions:
            found = self._embedding()
            self._keep(found, 0)
            yield from found
        for layer in range(self.state.layer, self.run.text.num_hidden_layers):
            lacking = list(missing(self.run.reader.source, layer_specs(self.run.reader.source.config, layer)).values())
            if lacking:
                yield self._stopped(f"{len(lacking)} tensors are not there, first {located(self.run, lacking[0])}")
                return
            began = time.monotonic()
            found = list(self._layer(layer))
            self._keep(found, layer + 1)
            self.run.note(told(layer, self.run.text.num_hidden_layers, found, began))
            yield from found
        yield from self._ends()

    def _keep(self, found: list[Finding], layer: int) -> None:
        self.state.findings += found
        self.state.layer = layer
        self.state.write()

    def _embedding(self) -> list[Finding]:
        sides, found = {}, []
        for name, ends in ends_of(self.run, self.state.ids, self.plan.truth_layers > 0).items():
            sides[name] = ends.embed(self.state.ids)
        place = self.run.place("chain", False)
        found.append(compared(place, self.run.text, EMBEDDING, sides["port"], sides["noise"], 0.0))
        for name, embedded in sides.items():
            self.state.positions[name] = [
                Position(part, np.zeros((0, *part.shape), part.dtype))
                for part in np.split(embedded, self._ends_of_pieces(), axis=1)
            ]
        return found

    def _ends_of_pieces(self) -> list[int]:
        return [self.run.tokens + step for step in range(self.plan.decode)]

    def _stopped(self, why: str) -> Finding:
        layer = min(self.state.layer, self.run.text.num_hidden_layers - 1)
        tap = f"{LAYERS}{layer}.output"
        note = f"the chain ends before layer {self.state.layer}: {why}; single layers are checked by their numbers"
        return self.run.place("chain", False).finding(quantity(self.run.text, tap), tap, "unsupported", note=note)

    def _layer(self, layer: int) -> Iterator[Finding]:
        """One layer on every side; the positions move on."""
        truth = layer < self.plan.truth_layers
        sides, positions = LayerSides(self.run, layer, truth=truth), self.state.positions
        reference = sides.noise.session.passes(positions["noise"])
        results = {"noise": reference, "port": sides.port.session.passes(positions["port"])}
        if truth:
            results["truth"] = sides.truth.session.passes(positions["truth"])
        name = f"{LAYERS}{layer}.{INDICES}"
        ties = 0
        if self.run.text.is_moe(layer):
            choice, results = self._followed(sides, results, name)
            ties = len(choice.tied)
            what, place = quantity(self.run.text, name), self.run.place("chain", False)
            status = "fail" if len(choice.wrong) else "pass"
            note = f"{len(choice.wrong)} tokens with other experts away from ties" if len(choice.wrong) else ""
            error = float("inf") if len(choice.wrong) else 0.0
            yield place.finding(what, name, status, error=error, allowed=0.0, ties=ties, note=note)
        taps = {side: [taps for _, taps in result] for side, result in results.items()}
        names = [f"{LAYERS}{layer}.{what}" for what in (*SHOWN, *(ROUTED if self.run.text.is_moe(layer) else ()))]
        together = {side: joined(result, names) for side, result in taps.items()}
        for tap in names:
            yield self._grown(tap, together)
        for side, result in results.items():
            positions[side] = [position for position, _ in result]
        if not truth:
            positions.pop("truth", None)
        self.run.experts[layer] = len(sides.bank)

    def _followed(self, sides: LayerSides, results: dict, name: str):
        """Judge the port's choice by the reference's margins; sides that chose otherwise run again with its choice."""
        own = {side: [taps for _, taps in result] for side, result in results.items()}
        prefix = name.removesuffix(INDICES)
        flat = {
            side: {
                prefix + what: np.concatenate([taps[prefix + what] for taps in pieces]) for what in (INDICES, SCORES)
            }
            for side, pieces in own.items()
        }
        margin = {prefix + MARGIN: np.concatenate([taps[prefix + MARGIN] for taps in own["noise"]])}
        choice = compare_choice(flat["port"][name], flat["noise"] | margin, flat["port"], name)
        imposed = [taps[name] for taps in own["noise"]]
        for side in results:
            if not np.array_equal(flat[side][name], flat["noise"][name]):
                session = getattr(sides, side).session
                results[side] = session.passes(self.state.positions[side], imposed)
        return choice, results

    def _grown(self, tap: str, sides: dict[str, Taps]) -> Finding:
        """One tap after so many layers: against float64 where it is carried along, else against the reference."""
        place, what = self.run.place("chain", False), quantity(self.run.text, tap)
        port, noise = sides["port"][tap], sides["noise"][tap]
        if "truth" not in sides:
            return compared(place, self.run.text, tap, port, noise, APART)
        own = measure(noise, sides["truth"][tap])["error"]
        allowed = CHAINED.allowed("float32", own, "float32")
        if self.run.text.hidden_size >= WIDE:
            allowed = WIDE_FACTOR * max(own, FLOOR["float32"])
        result = measure(port, sides["truth"][tap])
        status = "pass" if result["error"] <= allowed else "fail"
        return place.finding(what, tap, status, allowed=allowed, noise=own, inputs_agree=True, **result)

    def _ends(self) -> Iterator[Finding]:
        """The last mix and norm, and the logits."""
        sides: dict[str, Taps] = {}
        for name, ends in ends_of(self.run, self.state.ids, "truth" in self.state.positions).items():
            hidden = [ends.output(position) for position in self.state.positions[name]]
            sides[name] = {NORM: np.concatenate(hidden, axis=1)}
        yield self._grown(NORM, sides)
        logits = head(self.run, {name: taps[NORM] for name, taps in sides.items()})
        yield self._grown("logits", {name: {"logits": value} for name, value in logits.items()})


def told(layer: int, layers: int, found: list[Finding], began: float) -> str:
    """A line of progress: how far the port's prefix sum is off after a layer, and what the layer cost."""
    after = next(finding for finding in found if finding.tap == f"{LAYERS}{layer}.output")
    own = f", the reference's own {after.noise:.1e}" if after.noise is not None else ""
    ties, wrong = sum(f.ties for f in found), sum(f.status == "fail" for f in found)
    seconds, memory = time.monotonic() - began, peak_rss() / 1e9
    notes = f"{f', {ties} ties' if ties else ''}{f', {wrong} FAILED' if wrong else ''}"
    return f"layer {layer} of {layers}: error {after.error:.1e}{own}{notes}, {seconds:.0f} s, {memory:.1f} GB at most"
