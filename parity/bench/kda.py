"""``k3-parity bench kda``: the forms of Kimi Delta Attention (K3.md §4) side by side, in time and in error.

Everything runs in one process on the same inputs and takes turns, so that a busy machine slows all forms alike: the
ratios hold where the seconds do not. The truth is the recurrence in float64. fla-core's plain PyTorch forms take part
where they are installed (extra ``peers``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from reference.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = "k3-parity/bench-kda/1"
CHUNK_SIZE, PEER_CHUNK_SIZE = 32, 64  # each form's own default
RECURRENCE, CHUNKED, BOUND = "recurrence", "chunked", "matrix products alone"
FLA_RECURRENCE, FLA_CHUNKED = "fla-core recurrent", "fla-core chunked"
NOT_INSTALLED = "not installed"
# How long torch's threads wait for each other before they sleep. By default they spin for milliseconds, which on a busy
# machine takes the processor from the very thread they wait for: a hundred times slower. Read when torch is loaded.
SPIN = "1000"

Row = dict[str, Any]
Form = Callable[[], "tuple[Tensor, Tensor] | None"]


def draw(length: int, heads: int, head_dim: int) -> dict[str, Tensor]:
    """Float32 inputs of a KDA call as a layer makes them: unit keys, the bounded gate with log-decays all over (-5, 0).

    Each head has its own rate, each channel its own bias; a chunk's running sums come to about -80, as in real layers.
    q, k, v, log_decay [1, T, H, D], beta [1, T, H], state [1, H, D, D].
    """
    import torch

    from reference.kda import l2_normalize, log_decay, scaled_query, write_strength

    make = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make)

    rates = torch.linspace(0.25, 4.0, heads).log()
    return {
        "q": scaled_query(normal(1, length, heads, head_dim)),
        "k": l2_normalize(normal(1, length, heads, head_dim)),
        "v": normal(1, length, heads, head_dim),
        "log_decay": log_decay(normal(1, length, heads, head_dim), rates, normal(heads * head_dim), -5.0),
        "beta": write_strength(normal(1, length, heads)),
        "state": normal(1, heads, head_dim, head_dim),
    }


def matrix_products(length: int, heads: int, head_dim: int) -> Form:
    """Only the matrix products that the chunked form cannot do without, on random numbers: a bound on its time.

    For each chunk of C tokens: keys and queries with the earlier half of the keys [2C, D] × [D, C/2] (what all levels
    of the tree have together), both with the state [2C, D] × [D, D], two products [C, C] × [C, D], and the state's
    update [D, C] × [C, D].
    """
    import torch

    C, D = CHUNK_SIZE, head_dim
    shapes = [(2 * C, D, C // 2), (2 * C, D, D), (C, C, D), (C, C, D), (D, C, D)]
    pairs = [(torch.randn(heads, m, n), torch.randn(heads, n, p)) for m, n, p in shapes]

    def run_all() -> None:
        for _ in range(-(-length // C)):
            for left, right in pairs:
                torch.bmm(left, right)

    return run_all


def peer_forms(inputs: dict[str, Tensor]) -> dict[str, Form | str]:
    """fla-core's two plain PyTorch forms, or the reason why one cannot run. q is scaled already, hence scale 1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda
        except ImportError:
            return {FLA_RECURRENCE: NOT_INSTALLED, FLA_CHUNKED: NOT_INSTALLED}
    names = {"q": "q", "k": "k", "v": "v", "log_decay": "g", "beta": "beta", "state": "initial_state"}
    call = {names[name]: x for name, x in inputs.items()} | {"scale": 1.0, "output_final_state": True}
    whole = inputs["q"].shape[1] % PEER_CHUNK_SIZE == 0
    return {
        FLA_RECURRENCE: lambda: naive_recurrent_kda(**call),
        FLA_CHUNKED: (lambda: naive_chunk_kda(**call, chunk_size=PEER_CHUNK_SIZE)) if whole else "whole chunks only",
    }


def relative_rms(found: Tensor, truth: Tensor) -> float:
    """‖found − truth‖ / ‖truth‖ in float64."""
    return float((found.double() - truth).norm() / truth.norm())


def take_turns(forms: dict[str, Form], repeats: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Each form's shortest time in seconds over ``repeats`` rounds, and its last result."""
    shortest, results = dict.fromkeys(forms, float("inf")), {}
    for _ in range(repeats):
        for name, form in forms.items():
            start = time.perf_counter()
            results[name] = form()
            shortest[name] = min(shortest[name], time.perf_counter() - start)
    return shortest, results


def rows_for(length: int, heads: int, head_dim: int, repeats: int) -> list[Row]:
    """One row a form. ``times_chunked``: its seconds over the chunked form's; ``times_own_error``: its larger error's
    multiple of the float32 recurrence's own. What a form has not, or could not be measured, is None, with a ``note``.
    """
    from reference.kda import recurrent_kda
    from reference.kda_chunk import chunked_kda

    inputs = draw(length, heads, head_dim)
    forms: dict[str, Form | str] = {
        RECURRENCE: lambda: recurrent_kda(**inputs),
        CHUNKED: lambda: chunked_kda(**inputs, chunk_size=CHUNK_SIZE),
        BOUND: matrix_products(length, heads, head_dim),
        **peer_forms(inputs),
    }
    seconds, results = take_turns({name: form for name, form in forms.items() if not isinstance(form, str)}, repeats)
    truth = recurrent_kda(**{name: x.double() for name, x in inputs.items()})
    errors = {
        name: [relative_rms(found, true) for found, true in zip(result, truth, strict=True)]
        for name, result in results.items()
        if result is not None
    }
    rows = []
    for name, form in forms.items():
        output, state = errors.get(name, (None, None))
        own = [found / true for found, true in zip(errors.get(name, ()), errors[RECURRENCE], strict=False)]
        rows.append(
            {
                "length": length,
                "form": name,
                "seconds": seconds.get(name),
                "times_chunked": seconds[name] / seconds[CHUNKED] if name in seconds else None,
                "error_output": output,
                "error_state": state,
                "times_own_error": max(own, default=None),
                "note": form if isinstance(form, str) else "",
            }
        )
    return rows


def run(
    lengths: Sequence[int] = (1024, 4096), heads: int = 8, head_dim: int = 128, threads: int = 2, repeats: int = 3
) -> list[Row]:
    """Rows for each length, see ``rows_for``; batch 1, D_k = D_v = ``head_dim``; torch's thread count is put back.

    InputError for a number below 1.
    """
    for name, number in {
        "length": min(lengths),
        "heads": heads,
        "head_dim": head_dim,
        "threads": threads,
        "repeats": repeats,
    }.items():
        if number < 1:
            raise InputError("bench kda", name, "at least 1", number, "pass a positive number")
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN)
    import torch

    setting = {"heads": heads, "head_dim": head_dim, "threads": threads, "torch": torch.__version__}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            return [row | setting for length in lengths for row in rows_for(length, heads, head_dim, repeats)]
    finally:
        torch.set_num_threads(before)


def report(rows: list[Row], as_json: bool = False) -> None:
    """The rows on stdout, as a plain table or as one JSON document."""
    if as_json:
        print(json.dumps({"schema": SCHEMA, "rows": rows}, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    setting = ", ".join(
        f"{name.replace('_', ' ')} {rows[0][name]}" for name in ("heads", "head_dim", "threads", "torch")
    )
    table = Table(title=f"KDA forward, float32, batch 1, {setting}", title_justify="left", box=None)
    columns = {"length": "d", "form": "s", "seconds": ".4f", "times_chunked": ".2f"}
    columns |= {"error_output": ".2e", "error_state": ".2e", "times_own_error": ".2f", "note": "s"}
    for name, kind in columns.items():
        table.add_column(name.replace("_", " "), justify="left" if kind == "s" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*("-" if row[name] is None else format(row[name], kind) for name, kind in columns.items()))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main() -> None:
    """The benchmark at its defaults; ``--json`` for one JSON document on stdout and nothing else."""
    parser = argparse.ArgumentParser(prog="python -m parity.bench.kda", description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout and nothing else")
    as_json = parser.parse_args().json
    report(run(), as_json)


if __name__ == "__main__":
    main()
