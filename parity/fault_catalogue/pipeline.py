"""Faults of splitting one model over ranks, each put into the split port (K3.md §6, §7).

They are not in the matrix of the twins: a reference has no ranks. ``looks_like`` names one from what a split port
gives and what a right one gives with each fault in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parity.compare import crash_note
from parity.fault_catalogue.patches import around
from parity.faults import Fault, FaultyPort
from parity.likeness import distance
from parity.protocol import Port, Step, Taps
from parity.routing import MARGIN

FITS = 0.1
"""A fault fits that leaves at most this share of the error unexplained."""
Answer = list[Taps] | str
"""Taps by step, or the words with which the port failed."""


@dataclass(frozen=True)
class SplitFault:
    """``fault`` shows in a port that is split like ``split``, as a wrong quantity of its module or, where ranks tell
    each other what they send, as a refusal whose words match ``says``."""

    fault: Fault
    split: str
    says: str = ""

    def put_into(self, port: Port) -> FaultyPort:
        """``port``, which is one of ``pipeline:…``, with the fault in all its ranks."""
        return FaultyPort(port, "port", [self.fault])


def prefix_sum_alone(original: Callable, package: str, *call: Any) -> dict:
    return {"prefix_sum": original(*call)["prefix_sum"]}


def as_bfloat16(original: Callable, package: str, transport: Any, sender: int, layer: int, shapes: Any) -> dict:
    import mlx.core as mx

    return original(transport, sender, layer, {name: (shape, mx.bfloat16) for name, (shape, _) in shapes.items()})


_rank = threading.local()


def not_added_up(original: Callable, package: str, self: Any, z: Any, indices: Any, weights: Any) -> Any:
    _rank.transport = self.transport
    return self.partial(z, indices, weights)


def added_up_after(original: Callable, package: str, self: Any, x: Any) -> Any:
    normed = original(self, x)
    return _rank.transport.all_sum(normed) if self.tap_path.endswith(".routed_expert_norm") else normed


def of_rank_0(original: Callable, package: str, experts: int, ranks: int, rank: int) -> range:
    return original(experts, ranks, 0)


def without_remainder(original: Callable, package: str, layers: int, ranks: int) -> list[range]:
    length = layers // ranks
    return [range(length * rank, length * (rank + 1)) for rank in range(ranks)]


def last_one_again(original: Callable, package: str, layers: int, ranks: int) -> list[range]:
    return [range(max(0, stage.start - 1), stage.stop) for stage in original(layers, ranks)]


FAULTS: tuple[SplitFault, ...] = (
    SplitFault(
        Fault(
            "F46",
            "attn_res",
            "a stage hands over the prefix sum alone, without the blocks",
            "the sources of every mix after the cut are missing, until a new block is begun",
            {"pipeline.handed_over": around(prefix_sum_alone)},
        ),
        "2",
    ),
    SplitFault(
        Fault(
            "F47",
            "hand-over",
            "the buffer for the state is bfloat16, the state that is sent is float32",
            "garbage or NaN, on several ranks only",
            {"pipeline.receive_state": around(as_bfloat16)},
        ),
        "2",
        r"hand-over of prefix_sum: expected mlx\.core\.bfloat16 .*, found mlx\.core\.float32 ",
    ),
    SplitFault(
        Fault(
            "F62",
            "experts",
            "every rank norms its own partial sum, and the norms are added",
            "the norm is not linear: each part comes out at full size",
            {
                "expert_split.SplitExperts.__call__": around(not_added_up),
                "norm.RMSNorm.__call__": around(added_up_after),
            },
        ),
        "experts=2",
    ),
    SplitFault(
        Fault(
            "F62a",
            "experts",
            "the ranks' partial sums are never added",
            "every rank goes on with its own experts alone",
            {"expert_split.SplitExperts.__call__": around(not_added_up)},
        ),
        "experts=2",
    ),
    SplitFault(
        Fault(
            "F64",
            "experts",
            "every rank loads the experts of rank 0",
            "the sum counts one share as often as there are ranks, and the others never",
            {"expert_split.share": around(of_rank_0)},
        ),
        "experts=2",
    ),
    SplitFault(
        Fault(
            "F65",
            "attn_res",
            "layers that are left over when their number is divided by that of the ranks run nowhere",
            "plausible text",
            {"pipeline.stages": around(without_remainder)},
        ),
        "2",
    ),
    SplitFault(
        Fault(
            "F65a",
            "hand-over",
            "the last layer of a stage is also the first of the next",
            "plausible text",
            {"pipeline.stages": around(last_one_again)},
        ),
        "2",
        r"hand-over of prefix_sum: expected .* for layer 2, found .* for layer 3$",
    ),
)


def answer(port: Port, checkpoint: Path, dtype: str, steps: Sequence[Step]) -> Answer:
    """What a port gives for these steps, or how it fails."""
    try:
        return port.open(checkpoint, dtype).run(steps)
    except Exception as error:  # whatever it is, it is what this port answers
        return crash_note(error)


def apart(left: Answer, right: Answer) -> float:
    """How far two answers are from each other: the root mean square over all taps; one that is missing counts whole."""
    if isinstance(left, str) or isinstance(right, str):
        return float(left != right)
    values = []
    for a, b in zip(left, right, strict=True):
        for name in a.keys() | b.keys():
            if not name.endswith(MARGIN):
                values.append(distance(a[name], b[name]) if name in a and name in b else 1.0)
    return float(np.sqrt(np.mean(np.square(values))))


def known_answers(split: str, checkpoint: Path, dtype: str, steps: Sequence[Step]) -> dict[str, Answer]:
    """What a right port gives that is split like ``split``, under "", and what it gives with each fault, by its id."""
    from parity.ports.split import SplitPort

    right = SplitPort(split)
    able = [item for item in FAULTS if ("experts" in item.split) == right.split.experts]
    ports = {"": right} | {item.fault.id: item.put_into(right) for item in able}
    return {id: answer(port, checkpoint, dtype, steps) for id, port in ports.items()}


def looks_like(found: Answer, known: dict[str, Answer]) -> list[str]:
    """The faults that explain what a split port gave, the best first; none if it is right."""
    error = apart(found, known[""])
    residuals = {id: apart(found, faulty) for id, faulty in known.items() if id and error}
    return sorted((id for id, value in residuals.items() if value <= FITS * error), key=residuals.__getitem__)
