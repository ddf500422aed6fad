"""Small charts as SVG: lines, stacked bars, bars.  Text in, text out; colours follow the page.

Always true: everything from outside is escaped; a chart of nothing says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 26, 30
COLORS = (
    "#3b7dd8",
    "#e0883a",
    "#3fa35c",
    "#c94f4f",
    "#8a63c9",
    "#8c6d4f",
    "#d16fb0",
    "#7a7a7a",
    "#a9a832",
    "#2fa5b5",
)


def lines(title: str, x: Sequence[float], series: Mapping[str, Sequence[float | None]]) -> str:
    """One line per series over the same ``x``; None leaves a gap."""
    known = [value for values in series.values() for value in values if value is not None]
    if not x or not known:
        return _nothing(title)
    frame = _Frame(min(x), max(x), min(0.0, *known), max(known))
    parts = []
    for color, (name, values) in zip(_cycle(len(series)), series.items(), strict=True):
        points = [
            f"{frame.x(at):.1f},{frame.y(value):.1f}"
            for at, value in zip(x, values, strict=True)
            if value is not None
        ]
        dots = "".join(
            f'<circle cx="{one.split(",")[0]}" cy="{one.split(",")[1]}" r="2" fill="{color}"/>'
            for one in points[:200]
        )
        parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" '
            f'stroke-width="1.8"><title>{escape(name)}</title></polyline>{dots}'
        )
    return _whole(title, frame, parts, list(series))


def stacked(title: str, x: Sequence[float], series: Mapping[str, Sequence[float]]) -> str:
    """Bars of seconds on one another, one bar per ``x``."""
    totals = [sum(values[index] for values in series.values()) for index in range(len(x))]
    if not totals or not max(totals):
        return _nothing(title)
    frame = _Frame(min(x) - 0.5, max(x) + 0.5, 0.0, max(totals))
    width = max(1.0, 0.8 * (frame.x(min(x) + 1) - frame.x(min(x))))
    base = [0.0] * len(x)
    parts = []
    for color, (name, values) in zip(_cycle(len(series)), series.items(), strict=True):
        for index, (at, value) in enumerate(zip(x, values, strict=True)):
            if value <= 0:
                continue
            top, bottom = frame.y(base[index] + value), frame.y(base[index])
            base[index] += value
            parts.append(
                f'<rect x="{frame.x(at) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{bottom - top:.2f}" fill="{color}"><title>{escape(name)}, step {at:g}: '
                f"{value:.3f}</title></rect>"
            )
    return _whole(title, frame, parts, list(series))


def bars(title: str, values: Mapping[str, float]) -> str:
    """One bar per name, in the order given."""
    if not values or not max(values.values()):
        return _nothing(title)
    frame = _Frame(0, len(values), 0.0, max(values.values()), has_x=False)
    parts = []
    for index, (name, value) in enumerate(values.items()):
        left, right = frame.x(index + 0.1), frame.x(index + 0.9)
        top = frame.y(value)
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
            f'height="{frame.y(0) - top:.1f}" fill="{COLORS[0]}"><title>{escape(name)}: '
            f"{value:g}</title></rect>"
            f'<text x="{(left + right) / 2:.1f}" y="{HEIGHT - 12}" text-anchor="middle">'
            f"{escape(name)}</text>"
        )
    return _whole(title, frame, parts, [])


class _Frame:
    def __init__(
        self, left: float, right: float, low: float, high: float, *, has_x: bool = True
    ) -> None:
        self.left, self.right = left, right if right > left else left + 1
        self.low, self.high = low, high if high > low else low + 1
        self.has_x = has_x

    def x(self, value: float) -> float:
        share = (value - self.left) / (self.right - self.left)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)


def _whole(title: str, frame: _Frame, parts: Sequence[str], names: Sequence[str]) -> str:
    grid = []
    for value in _ticks(frame.low, frame.high):
        y = frame.y(value)
        grid.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    if frame.has_x:
        grid += [
            f'<text x="{frame.x(at):.1f}" y="{HEIGHT - 12}" text-anchor="middle">{at:g}</text>'
            for at in _ticks(math.ceil(frame.left), math.floor(frame.right), 8)
        ]
    legend = "".join(
        f'<span><i style="background:{color}"></i>{escape(name)}</span>'
        for color, name in zip(_cycle(len(names)), names, strict=True)
    )
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<text x="{_LEFT}" y="16" class="title">{escape(title)}</text>{"".join(grid)}'
        f"{''.join(parts)}</svg><figcaption>{legend}</figcaption></figure>"
    )


def _nothing(title: str) -> str:
    return f"<figure><p><b>{escape(title)}</b>: nothing was recorded</p></figure>"


def _cycle(num: int) -> list[str]:
    return [COLORS[index % len(COLORS)] for index in range(num)]


def _ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers between ``low`` and ``high``."""
    if high <= low:
        return [low]
    step = 10 ** math.floor(math.log10((high - low) / wanted))
    for factor in (1, 2, 5, 10):
        if (high - low) / (step * factor) <= wanted:
            step *= factor
            break
    first = math.ceil(low / step)
    return [round(number * step, 10) for number in range(first, math.floor(high / step) + 1)]
