"""``k3-parity trace``: run a port over a checkpoint and keep every tap."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parity.cli.common import PortName, stderr


def trace(
    checkpoint: Annotated[Path, typer.Option("--checkpoint", help="A checkpoint folder in the released format.")],
    inputs: Annotated[Path, typer.Option("--inputs", help="An inputs.safetensors file.")],
    out: Annotated[Path, typer.Option("--out", help="The trace file to write.")],
    port: PortName = "mlx",
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32, bfloat16; the reference also has float64.")
    ] = "float32",
    impose_routing: Annotated[
        Path | None, typer.Option("--impose-routing", help="A trace whose choice of experts the port must use.")
    ] = None,
) -> None:
    """Write a trace: one tensor per tap of the runs prefill, decode and padded."""
    from parity.ports import load_port
    from parity.trace import load_trace, save_trace
    from parity.tracing import load_inputs, routing_of, trace_port

    imposed = routing_of(load_trace(impose_routing)[0]) if impose_routing else None
    taps, metadata = trace_port(load_port(port), checkpoint, load_inputs(inputs), dtype, imposed)
    save_trace(out, taps, metadata)
    stderr.print(f"{len(taps)} taps written to {out}", highlight=False)
