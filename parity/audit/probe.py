"""One module of a checkpoint, run alone in float64 by the reference, under one reading or another.

Only the tensors of that module are read, so that a layer of the released checkpoint can be audited as well as a mini
model. Where the folder holds the authors' own results (a golden case), the module gets their input, and their output is
what decides between the readings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fixtures.values import normal, words
from parity.audit.entry import Status
from parity.audit.subject import TRACE, Subject
from parity.faults import Fault
from parity.metrics import cosine, relative_rms
from reference.checkpoint import LAYERS
from reference.errors import InputError

TOKENS = 24
GRID = (1, 4, 6)
"""Not square: rows and columns cannot be taken for each other."""
SOME = 3
MANY = 8
"""Of at most MANY layers all are looked at, of more SOME: the first, the middle one and the last."""
LARGEST_MODULE = 2 * 10**9
"""Bytes; the experts of a layer of the released size are not run."""
TINY = 2e-3
"""Rows this small have latents of mean square near 1e-5, where an epsilon shows."""
SEEN = 1e-4
"""The authors' float32 is nearer than this to the right reading; another one that is not further off cannot be told."""


@dataclass(frozen=True)
class Probe:
    """``run(x)`` builds the module, loads it and gives its output, under the patches that are in force."""

    label: str
    x: np.ndarray
    run: Callable[[np.ndarray], np.ndarray]
    authors: np.ndarray | None = None

    def tiny(self) -> Probe:
        return replace(self, x=TINY * self.x, authors=None)


class Apart(NamedTuple):
    """How far another reading moves a module's output; ``authors`` is how far each reading is from the authors' own
    result: (K3.md's, the other)."""

    labels: tuple[str, ...]
    moved: tuple[float, ...]
    cosines: tuple[float, ...]
    authors: tuple[float, float] | None

    @property
    def most(self) -> float:
        return max(self.moved)

    @property
    def decided(self) -> bool:
        """Whether the authors' own result tells the two readings apart."""
        return self.authors is not None and self.authors[0] < SEEN and self.authors[1] > 10 * self.authors[0]

    @property
    def preferred(self) -> bool:
        """Whether the authors' own result is this other reading's, and not K3.md's."""
        return self.authors is not None and self.authors[1] < SEEN and self.authors[0] > 10 * self.authors[1]

    def text(self, reading: str) -> str:
        where, cosines = ", ".join(self.labels), span(self.cosines, ".5f")
        moved = f"{reading} moves the output of {where} by {span(self.moved)} (relative RMS), cosine {cosines}"
        return moved + self.authors_text()

    def authors_text(self) -> str:
        if self.authors is None:
            return ""
        right, other = self.authors
        return f"; from the authors' own output K3.md's reading is {right:.1e} off, this one {other:.1e}"


def span(values: Sequence[float], form: str = ".2g") -> str:
    low, high = (format(value, form) for value in (min(values), max(values)))
    return low if low == high else f"{low} … {high}"


def apart(probes: Iterable[Probe], other: Fault) -> Apart:
    """Run every probe under K3.md's reading and under ``other``."""
    labels, moved, cosines, right_off, other_off = [], [], [], [], []
    for probe in probes:
        right = probe.run(probe.x)
        with other.applied("reference"):
            changed = probe.run(probe.x)
        labels.append(probe.label)
        moved.append(relative_rms(changed, right))
        cosines.append(cosine(changed, right))
        if probe.authors is not None:
            right_off.append(relative_rms(right, probe.authors))
            other_off.append(relative_rms(changed, probe.authors))
    authors = (max(right_off), min(other_off)) if right_off else None
    return Apart(tuple(labels), tuple(moved), tuple(cosines), authors)


def some(layers: Sequence[int]) -> list[int]:
    if len(layers) <= MANY:
        return list(layers)
    return [layers[i * (len(layers) - 1) // (SOME - 1)] for i in range(SOME)]


def attention_probes(subject: Subject, layers: Sequence[int]) -> list[Probe]:
    """KDA or MLA of these layers, on rows as the layer's own input norm gives them."""
    from reference.kda import KimiDeltaAttention
    from reference.mla import GatedMLA

    text, probes = subject.config.text_config, []
    for layer in some(layers):
        prefix = f"{LAYERS}{layer}."
        kind = KimiDeltaAttention if text.is_kda(layer) else GatedMLA
        run = runner(subject, f"{prefix}self_attn.", lambda kind=kind: kind(text), lambda module, x: module(x))
        probes.append(text_probe(subject, layer, "self_attn", "input_layernorm", run))
    return probes


def moe_probes(subject: Subject) -> list[Probe]:
    """The first layer with routed experts; none where they are too many to run."""
    from reference.moe import LatentMoE

    text = subject.config.text_config
    layer = next((i for i in range(text.num_hidden_layers) if text.is_moe(i)), None)
    if layer is None or subject.shards.expert_format != "mxfp4":
        return []
    prefix = f"{LAYERS}{layer}.block_sparse_moe."
    if sum(spec.nbytes for name, spec in subject.shards.specs.items() if name.startswith(prefix)) > LARGEST_MODULE:
        return []
    run = runner(subject, prefix, lambda: LatentMoE(text, "mxfp4"), lambda module, x: module(x))
    return [text_probe(subject, layer, "mlp", "post_attention_layernorm", run)]


def text_probe(subject: Subject, layer: int, part: str, norm: str, run: Callable) -> Probe:
    prefix, label = f"{LAYERS}{layer}.", f"layer {layer} {part}"
    names = tuple(f"prefill/{prefix}{part}.{what}" for what in ("input", "output"))
    if pair := known_pair(subject, names, subject.config.text_config.hidden_size):
        return Probe(label, pair[0], run, pair[1])
    weight = subject.shards.read(f"{prefix}{norm}.weight").astype(np.float64)
    return Probe(label, rows(label, 1, TOKENS, len(weight)) * weight, run)


def vision_probes(subject: Subject) -> list[Probe]:
    """Blocks of the tower; of a golden case the first one, whose input is known."""
    from reference.vision import VisionBlock
    from reference.vision_position import rope_turns

    vision, golden = subject.config.vision_config, subject.golden
    names = ("vision/patch_embed.output", "vision/encoder.blocks.0.output")
    known = known_pair(subject, names, vision.vt_hidden_size) if "vision.grid_thws" in golden else None
    grids = [tuple(map(int, row)) for row in golden["vision.grid_thws"]] if known else [GRID]

    def called(module: Any, x: Any) -> Any:
        return module(x, grids, rope_turns(grids, vision.head_dim, x.dtype))

    probes = []
    for block in [0] if known else some(range(vision.vt_num_hidden_layers)):
        prefix, label = f"vision_tower.encoder.blocks.{block}.", f"tower block {block}"
        run = runner(subject, prefix, lambda: VisionBlock(vision), called)
        if known:
            probes.append(Probe(label, known[0], run, known[1]))
        else:
            probes.append(Probe(label, rows(label, prod(GRID), vision.vt_hidden_size), run))
    return probes


def projector_probes(subject: Subject) -> list[Probe]:
    from reference.projector import Projector

    vision = subject.config.vision_config
    run = runner(subject, "mm_projector.", lambda: Projector(vision), lambda module, x: module(x))
    kernel = vision.merge_kernel_size
    return [Probe("projector", rows("projector", 6, kernel[0] * kernel[1], vision.mm_hidden_size), run)]


def known_pair(subject: Subject, names: tuple[str, str], width: int) -> tuple[np.ndarray, np.ndarray] | None:
    """A module's input and output of the authors' own run, if there; InputError if they are of another model."""
    if any(name not in subject.golden for name in names):
        return None
    x, y = (subject.golden[name] for name in names)
    if x.shape != y.shape or x.shape[-1] != width:
        mend = "remove it, or give the trace of this checkpoint"
        raise InputError(subject.shards.folder / TRACE, names[1], f"[…, {width}]", f"{x.shape}, {y.shape}", mend)
    return x.astype(np.float64), y


def rows(name: str, *shape: int) -> np.ndarray:
    """Normal rows of mean square 1, the same on every machine."""
    return normal(words(0, f"audit/{name}", 0, prod(shape)), 1.0).reshape(shape).astype(np.float64)


def runner(
    subject: Subject, prefix: str, build: Callable[[], Any], call: Callable[[Any, Any], Any]
) -> Callable[[np.ndarray], np.ndarray]:
    def run(x: np.ndarray) -> np.ndarray:
        import torch

        module = build()
        module.load_state_dict(loaded(subject, prefix, module.state_dict()), strict=True, assign=True)
        with torch.inference_mode():
            return call(module, torch.from_numpy(x)).numpy()

    return run


def loaded(subject: Subject, prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors below ``prefix`` in float64; bytes stay bytes."""
    import torch

    from reference.weights import to_torch

    tensors = {name: to_torch(subject.shards.read(prefix + name)) for name in state}
    return {name: t if t.dtype == torch.uint8 else t.double() for name, t in tensors.items()}


class Measured(NamedTuple):
    """The effect of every other reading, as evidence; ``decided``: the authors' own result rules all of them out.

    ``preferred`` are those that it is the result of.
    """

    evidence: tuple[str, ...]
    apart: dict[str, float]
    decided: bool
    preferred: tuple[str, ...] = ()

    def settled(self, verdict: str, status: Status) -> tuple[str, Status]:
        """The verdict, unless the authors' own result speaks for another reading."""
        if not self.preferred:
            return verdict, status
        return f'against K3.md: the authors\' own output is that of "{self.preferred[0]}"', "contradicted"


def measured(subject: Subject, probes: Callable[[], list[Probe]], others: Mapping[str, Fault]) -> Measured:
    """Run the probes under each of ``others`` (reading -> the fault that it is), where there are weights to run."""
    if subject.shards is None:
        return Measured(("how far the readings are apart needs the weights",), {}, False)
    found = probes()
    if not found:
        return Measured(("not run: there is no such module here, or it is too large to run alone",), {}, False)
    results = {reading: apart(found, fault) for reading, fault in others.items()}
    evidence = tuple(result.text(f'"{reading}"') for reading, result in results.items())
    decided = all(result.decided for result in results.values())
    preferred = tuple(reading for reading, result in results.items() if result.preferred)
    return Measured(evidence, {reading: result.most for reading, result in results.items()}, decided, preferred)
