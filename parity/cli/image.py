"""``k3-parity image``: what pictures must become, for ports in any language."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from parity.cli.common import stderr


def image(
    pictures: Annotated[list[Path], typer.Argument(help="Picture files, in order.")],
    out: Annotated[Path, typer.Option("--out", help="The safetensors file to write.")],
    config: Annotated[
        Path | None,
        typer.Option("--config", help="A folder with preprocessor_config.json; the released settings unless given."),
    ] = None,
) -> None:
    """Write pixel_values, grid_thws and token_counts of the pictures; print sizes, counts and prompts as JSON."""
    import numpy as np

    from parity.trace import save_trace
    from reference.image_processor import ImageProcessor
    from reference.picture import open_picture

    processor = ImageProcessor.from_folder(config) if config else ImageProcessor()
    opened = [open_picture(str(path)) for path in pictures]
    batch = processor.batch(opened)
    counts = [processor.resize_plan(*picture.size).token_count for picture in opened]
    arrays = {
        "pixel_values": batch.pixel_values,
        "grid_thws": batch.grid_thws,
        "token_counts": np.array(counts, np.int64),
    }
    save_trace(out, arrays, {"prompts": json.dumps(batch.prompts)})
    rows = [
        {"picture": str(path), "size": list(picture.size), "grid_thw": grid, "tokens": count, "prompt": prompt}
        for path, picture, grid, count, prompt in zip(
            pictures, opened, batch.grid_thws.tolist(), counts, batch.prompts, strict=True
        )
    ]
    print(json.dumps({"format": 1, "pictures": rows}))
    stderr.print(f"{len(batch.pixel_values)} patches of {len(rows)} pictures written to {out}", markup=False)
