"""Lines over time as SVG, drawn by hand: a few panels side by side with one scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final

PANEL: Final = (420, 260)
MARGIN: Final = (56, 40, 16, 40)
"""Left, top, right, bottom of a panel."""
COLOURS: Final = ("#0969da", "#bf3989", "#1a7f37", "#9a6700", "#8250df", "#cf222e", "#57606a", "#0550ae")

MOST_NAMED: Final = 8

Lines = Mapping[str, Sequence[tuple[float, float]]]


def draw(
    path: Path, title: str, unit: str, panels: Mapping[str, Lines], apart: Mapping[str, str] | None = None
) -> None:
    """Write one panel for each entry. Of many lines the largest over all panels are named, the rest are grey.

    Panels ``apart`` have a height of their own, in the unit given.
    """
    apart = apart or {}
    width, height = PANEL[0] * len(panels), PANEL[1] + 24
    right = max((x for lines in panels.values() for line in lines.values() for x, _ in line), default=1.0) or 1.0
    together = [lines for name, lines in panels.items() if name not in apart]
    top = max((y for lines in together for line in lines.values() for _, y in line), default=1.0) or 1.0
    sizes: Counter[str] = Counter()
    for lines in panels.values():
        sizes.update({name: sum(y for _, y in line) for name, line in lines.items()})
    named = sorted(name for name, _ in sizes.most_common(MOST_NAMED))
    colours = dict(zip(named, COLOURS, strict=False))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="18" font-size="13" fill="#1f2328">{escape(title)}</text>',
    ]
    for number, (name, lines) in enumerate(panels.items()):
        own = max((y for line in lines.values() for _, y in line), default=1.0) or 1.0
        scale = (right, own if name in apart else top)
        parts += _panel(number * PANEL[0], name, apart.get(name, unit), lines, scale, colours)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _panel(
    left: int, name: str, unit: str, lines: Lines, scale: tuple[float, float], colours: Mapping[str, str]
) -> list[str]:
    x0, y0 = left + MARGIN[0], 24 + MARGIN[1]
    x1, y1 = left + PANEL[0] - MARGIN[2], 24 + PANEL[1] - MARGIN[3]
    right, top = scale

    def at(x: float, y: float) -> str:
        return f"{x0 + (x1 - x0) * x / right:.1f},{y1 - (y1 - y0) * y / top:.1f}"

    parts = [f'<text x="{x0}" y="{y0 - 8}" fill="#1f2328">{escape(name)}</text>']
    for step in range(5):
        y = y1 - (y1 - y0) * step / 4
        x = x0 + (x1 - x0) * step / 4
        parts += [
            f'<line x1="{x0}" y1="{y:.1f}" x2="{x1}" y2="{y:.1f}" stroke="#d0d7de" stroke-width="0.5"/>',
            f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#57606a">{top * step / 4:.3g}</text>',
            f'<text x="{x:.1f}" y="{y1 + 16}" text-anchor="middle" fill="#57606a">{right * step / 4:.0f} s</text>',
        ]
    parts.append(f'<text x="{x1}" y="{y0 - 8}" text-anchor="end" fill="#57606a">{escape(unit)}</text>')
    for line in sorted(lines, key=lambda line: line in colours):
        points = " ".join(at(x, y) for x, y in lines[line])
        colour = colours.get(line, "#afb8c1")
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
    for place, (line, colour) in enumerate(colours.items()):
        parts.append(f'<text x="{x0 + place * 44}" y="{y1 + 32}" fill="{colour}">{escape(line[:7])}</text>')
    return parts
