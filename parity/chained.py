"""Chained comparison: whole passes over caches, compared at every tap, real tokens only.

The truth of a batch is each row alone, without its padding, in one full pass. So padding, splits into prefill and
decode, and chunked prefill are all judged by the same yardstick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from parity.arrays import NUMPY_DTYPES, cast, stored_dtype
from parity.compare import NOT_COMPARED, Place, choice_finding, guarded, missing_finding
from parity.findings import Finding, measure
from parity.metrics import relative_rms
from parity.protocol import Step, Taps
from parity.quantities import TEXT_MODEL, TOP_TAPS, computed_order, quantity
from parity.routing import INDICES, SCORES, compare_choice, router_taps, scores_at_ties
from parity.sides import NOISES, Sides
from parity.tolerance import CHAINED
from reference.config import TextConfig

EMBEDDING = TEXT_MODEL + "embed_tokens.output"
FLATTENED = ("router.indices", "router.weights", "router.scores", "router.margin", "moe.latent", "moe.routed")
"""Taps whose tokens are flattened, [B·T, ...]."""
PER_SEQUENCE = "self_attn.state"
"""The tap that is not per token: the state after the last one."""
LOGITS = "logits"


class Batch:
    """Token ids [B, T] with a mask [B, T] (True at real tokens), fed in pieces of the given lengths.

    ``fill`` is None to feed ids, or the value to put into the embeddings of padded positions (NaN, 1e30).
    """

    def __init__(
        self, ids: np.ndarray, mask: np.ndarray | None, pieces: Sequence[int], fill: float | None = None
    ) -> None:
        self.ids, self.fill, self.pieces = ids, fill, tuple(pieces)
        self.padded = mask is not None and not mask.all()
        self.mask = np.ones(ids.shape, bool) if mask is None else mask.astype(bool)
        assert sum(self.pieces) == ids.shape[1], "the pieces must cover the tokens"

    def steps(self, embeddings: np.ndarray | None) -> list[Step]:
        """One step per piece; with ``embeddings`` [B, T, hidden] these are fed instead of ids."""
        steps, start = [], 0
        for length in self.pieces:
            part = slice(start, start + length)
            mask = self.mask[:, part] if self.padded else None
            if embeddings is None:
                steps.append(Step(input_ids=self.ids[:, part], mask=mask))
            else:
                steps.append(Step(inputs_embeds=embeddings[:, part], mask=mask))
            start += length
        return steps

    def split(self, per_token: np.ndarray) -> list[np.ndarray]:
        """[B, T, ...] -> per piece the flattened [B·t, ...], as routers see it."""
        ends = np.cumsum(self.pieces)[:-1]
        return [part.reshape(-1, *part.shape[2:]) for part in np.split(per_token, ends, axis=1)]

    def join(self, results: list[Taps]) -> Taps:
        """The pieces' taps as one pass: [B, T, ...] each, states after the last piece."""
        joined, rows = {}, self.ids.shape[0]
        for name in results[-1]:
            arrays = [taps[name] for taps in results]
            if name.endswith(PER_SEQUENCE):
                joined[name] = arrays[-1]
                continue
            if name.endswith(FLATTENED):
                arrays = [array.reshape(rows, -1, *array.shape[1:]) for array in arrays]
            joined[name] = np.concatenate(arrays, axis=1)
        return joined


def rows_alone(sides: Sides, side: str, batch: Batch, imposed: bool = False) -> Taps:
    """Each row's real tokens in one pass of the reference's ``side`` ("truth" or one of NOISES), put back at their
    places in the padded layout (zeros elsewhere); ``imposed``: with the truth's choice of experts."""
    layout: Taps = {}
    for row, real in enumerate(batch.mask):
        alone = Batch(batch.ids[row : row + 1, real], None, [int(real.sum())])
        taps = sides.row_alone(side, alone.ids, imposed)
        for name, array in alone.join([taps]).items():
            if name.endswith(PER_SEQUENCE):
                layout.setdefault(name, np.zeros((len(batch.mask), *array.shape[1:]), array.dtype))[row] = array[0]
            else:
                shape = (*batch.mask.shape, *array.shape[2:])
                layout.setdefault(name, np.zeros(shape, array.dtype))[row, real] = array[0]
    return layout


def chained_findings(place: Place, sides: Sides, text: TextConfig, batch: Batch) -> Iterator[Finding]:
    """Run ``batch`` on the port and judge every tap against rows alone."""
    truth = rows_alone(sides, "truth", batch)
    embeddings = None
    if batch.fill is not None:
        embeddings = cast(truth[EMBEDDING], sides.dtype).copy()
        embeddings[~batch.mask] = np.asarray(batch.fill, NUMPY_DTYPES[sides.dtype])
    steps = batch.steps(embeddings)
    found, problem = guarded(place, TOP_TAPS[LOGITS], LOGITS, lambda: batch.join(sides.port.run(steps)))
    if found is None:
        yield problem
        return
    noises = [rows_alone(sides, side, batch) for side in NOISES]
    routers = [name for name in router_taps(truth) if name in found]
    choices = dict(_choices(batch, truth, noises[0], found, routers))
    same = [all(_same_experts(batch, truth[name], side[name]) for name in routers) for side in (found, *noises)]
    if not all(same):
        routing = {name: _valid_everywhere(batch, truth[name]) for name in routers}
        pieces = [
            dict(zip(routing, parts, strict=True)) for parts in zip(*map(batch.split, routing.values()), strict=True)
        ]
        noises = [rows_alone(sides, side, batch, imposed=True) for side in NOISES]
        choices = dict(_choices(batch, truth, noises[0], found, routers))
        if not same[0]:
            imposed = lambda: batch.join(sides.port.run(steps, pieces))  # noqa: E731
            found, problem = guarded(place, TOP_TAPS[LOGITS], LOGITS, imposed)
        if found is None:
            yield from (choice_finding(place, quantity(text, name), name, choices[name]) for name in routers)
            yield problem
            return
    yield from _judge(place, text, batch, found, truth, noises, choices, sides.shown)


def _judge(place, text, batch, found, truth, noises, choices, shown) -> Iterator[Finding]:
    upstream_failed = False
    for name in sorted(truth, key=lambda tap: computed_order(text, tap)):
        if name.endswith(NOT_COMPARED):
            continue
        if batch.fill is not None and name == EMBEDDING:
            continue
        what = quantity(text, name)
        if name in choices:
            finding = choice_finding(place, what, name, choices[name])
        elif name not in found:
            finding = missing_finding(place, what, name, shown)
        else:
            finding = _value(place, what, name, batch, found, truth, noises, choices)
        yield finding.model_copy(update={"inputs_agree": not upstream_failed})
        upstream_failed = upstream_failed or finding.status == "fail"


def _value(place, what, name, batch, found, truth, noises, choices) -> Finding:
    port, true, near = found[name], truth[name], [noise[name] for noise in noises]
    if name.endswith(PER_SEQUENCE):
        pass
    elif port.shape != true.shape:
        near = [true]
    else:
        port, true, *near = (side[batch.mask] for side in (port, true, *near))
    if choice := choices.get(name.removesuffix(SCORES) + INDICES):
        port, *near = (scores_at_ties(side, true, choice.forgiven) for side in (port, *near))
    return _against_noise(place, what, name, port, true, near, exact=name.endswith(INDICES))


def _against_noise(place, what, name, port, true, near, exact: bool) -> Finding:
    """The worst draw of the reference's own rounding is the noise of a chained quantity."""
    noise_error = max(relative_rms(draw, true) for draw in near)
    allowed = 0.0 if exact else CHAINED.allowed(place.dtype, noise_error, stored_dtype(near[0]))
    result = measure(port, true)
    status = "pass" if result["error"] <= allowed else "fail"
    return place.finding(what, name, status, allowed=allowed, noise=noise_error, **result)


def _choices(batch: Batch, truth: Taps, noise: Taps, found: Taps, routers: list[str]):
    """Each router's choice in the free run; a token that follows a tie in its row has another input and is excused."""
    excused = np.zeros(batch.mask.shape, bool)
    real = np.flatnonzero(batch.mask)
    for name in routers:
        prefix = name.removesuffix(INDICES)
        flat = {tap: array[batch.mask] for tap, array in truth.items() if tap.startswith(prefix + "router.")}
        near = {tap: array[batch.mask] for tap, array in noise.items() if tap in flat}
        choice = compare_choice(found[name][batch.mask], flat, near, name, excused[batch.mask])
        yield name, choice
        for token in choice.tied:
            row, column = divmod(int(real[token]), batch.mask.shape[1])
            excused[row, column:] = True


def chain_findings(
    place: Place,
    text: TextConfig,
    truth: Taps,
    run_port: Callable[[], Taps],
    run_noise: Callable[[], Taps],
    real: np.ndarray | None = None,
    shown: frozenset[str] | None = None,
) -> Iterator[Finding]:
    """Judge every tap of ``truth`` in a pass without caches; ``real`` [B, T] says which positions mean anything, and
    ``shown`` which taps the port declares.

    Integers must be equal. Logits and embeddings of positions that are not real are not looked at.
    """
    names = sorted(truth, key=lambda tap: computed_order(text, tap))
    found, problem = guarded(place, quantity(text, names[0]), names[0], run_port)
    if found is None:
        yield problem
        return
    noise, upstream_failed = run_noise(), False
    for name in names:
        what = quantity(text, name)
        if name not in found:
            finding = missing_finding(place, what, name, shown)
        elif found[name].shape != truth[name].shape:
            finding = place.finding(what, name, "fail", **measure(found[name], truth[name]))
        else:
            finding = _chain_value(place, what, name, found, truth, noise, real)
        yield finding.model_copy(update={"inputs_agree": not upstream_failed})
        upstream_failed = upstream_failed or finding.status == "fail"


def _chain_value(place, what, name, found, truth, noise, real) -> Finding:
    port, true, near = found[name], truth[name], noise[name]
    exact = np.issubdtype(true.dtype, np.integer)
    if real is not None and not exact:
        port, true, near = port[real], true[real], near[real]
    return _against_noise(place, what, name, port, true, [near], exact)


def _same_experts(batch: Batch, left: np.ndarray, right: np.ndarray) -> bool:
    return np.array_equal(left[batch.mask], right[batch.mask])


def _valid_everywhere(batch: Batch, indices: np.ndarray) -> np.ndarray:
    """The truth's choice, and any legal one in padded positions, where nothing is compared."""
    legal = np.arange(indices.shape[-1])
    return np.where(batch.mask[..., None], indices, legal)
