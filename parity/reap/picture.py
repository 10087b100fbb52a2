"""Two pictures as SVG text: overlap between domains as a heat map, and what every size keeps as a curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from parity.reap.domains import Overlap
from parity.reap.report import Point
from reference.errors import InputError

CELL, MARGIN, WIDTH, HEIGHT, LINE = 64, 110, 640, 360, 18
FONT = 'font-family="sans-serif" font-size="13"'


def document(width: int, height: int, parts: Sequence[str]) -> str:
    """An SVG document on white."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {FONT}>'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>", ""])


def label(x: float, y: float, text: str, anchor: str = "start", colour: str = "black") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def shade(share: float, chance: float) -> str:
    """White at chance, blue towards 1, red below chance, where domains shun each other's experts."""
    above = (share - chance) / (1 - chance) if share >= chance and chance < 1 else 0.0
    below = (chance - share) / chance if share < chance else 0.0
    pale = round(255 * (1 - 0.8 * max(above, below)))
    return f"rgb({pale},{pale},255)" if below == 0 else f"rgb(255,{pale},{pale})"


def heat_map(found: Overlap) -> str:
    """Every pair of domains, in percent, shaded from chance."""
    names, parts = found.domains, []
    title = f"top {found.count} of {found.experts} experts in common; chance {100 * found.chance:.1f} % is white"
    parts.append(label(10, 22, title))
    for row, name in enumerate(names):
        y = MARGIN + row * CELL
        parts.append(label(MARGIN - 8, y + CELL / 2 + 4, name, "end"))
        parts.append(label(MARGIN + row * CELL + CELL / 2, MARGIN - 8, name, "middle"))
        for column in range(len(names)):
            share, x = float(found.shared[row, column]), MARGIN + column * CELL
            fill = shade(share, found.chance)
            parts.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{fill}" stroke="grey"/>')
            parts.append(label(x + CELL / 2, y + CELL / 2 + 4, f"{100 * share:.1f}", "middle"))
    side = MARGIN + CELL * len(names) + 20
    return document(max(side, 520), side, parts)


def curve(points: Sequence[Point], title: str) -> str:
    """Share of saliency kept over the size of the model; a line where a memory is reached."""
    left, right, top, bottom = 60, WIDTH - 20, 40, HEIGHT - 50
    low, high = points[0].nbytes, points[-1].nbytes

    def at(point: Point) -> tuple[float, float]:
        x = left + (right - left) * ((point.nbytes - low) / (high - low) if high > low else 0.5)
        return x, bottom - (bottom - top) * point.mass

    parts = [label(10, 22, title), f'<path d="M{left} {top} V{bottom} H{right}" fill="none" stroke="black"/>']
    for share in (0, 0.5, 1):
        parts.append(label(left - 6, bottom - (bottom - top) * share + 4, f"{100 * share:.0f} %", "end"))
    for point, anchor in ((points[0], "start"), (points[-1], "end")):
        parts.append(label(at(point)[0], bottom + 18, f"{point.nbytes / 1e9:,.4g} GB, {point.kept} experts", anchor))
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, points))
    parts.append(f'<polyline points="{path}" fill="none" stroke="steelblue" stroke-width="2"/>')
    marked = [point for point in points if point.memory_gb is not None]
    for line, point in enumerate(marked):
        x, y = at(point)
        parts.append(f'<path d="M{x:.1f} {bottom} V{y:.1f}" stroke="firebrick" stroke-dasharray="4 3"/>')
        text = f"{point.memory_gb:g} GB: {point.kept} experts, {100 * point.mass:.1f} %"
        anchor = "start" if x < WIDTH / 2 else "end"
        parts.append(label(x, bottom + 36 + LINE * line, text, anchor, "firebrick"))
    return document(WIDTH, HEIGHT + LINE * len(marked), parts)


def write_picture(path: Path, svg: str) -> None:
    """Raises InputError where the file cannot be written."""
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise InputError(path, "picture", "a place to write to", error.strerror, "choose another file") from None
