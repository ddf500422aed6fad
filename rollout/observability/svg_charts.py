"""Small charts as SVG: lines, stacked bars, bars.  Text takes the colour of the page.

Always true: all names and titles are escaped; a chart without data shows a sentence instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle

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
    drawn = [value for values in series.values() for value in values if value is not None]
    if not x or not drawn:
        return _empty(title)
    frame = _Frame(min(x), max(x), min(0.0, *drawn), max(drawn))
    parts = []
    for color, (name, values) in zip(cycle(COLORS), series.items()):
        points = [
            (f"{frame.x(at):.1f}", f"{frame.y(value):.1f}")
            for at, value in zip(x, values, strict=True)
            if value is not None
        ]
        dots = "".join(
            f'<circle cx="{left}" cy="{top}" r="2" fill="{color}"/>' for left, top in points[:200]
        )
        parts.append(
            f'<polyline points="{" ".join(map(",".join, points))}" fill="none" stroke="{color}" '
            f'stroke-width="1.8"><title>{escape(name)}</title></polyline>{dots}'
        )
    return _figure(title, frame, parts, list(series))


def stacked(title: str, x: Sequence[float], series: Mapping[str, Sequence[float]]) -> str:
    """One bar per ``x``, with the values of all series (seconds) stacked."""
    totals = [sum(values[index] for values in series.values()) for index in range(len(x))]
    if not totals or not max(totals):
        return _empty(title)
    frame = _Frame(min(x) - 0.5, max(x) + 0.5, 0.0, max(totals))
    width = max(1.0, 0.8 * (frame.x(min(x) + 1) - frame.x(min(x))))
    base = [0.0] * len(x)
    parts = []
    for color, (name, values) in zip(cycle(COLORS), series.items()):
        for index, (at, value) in enumerate(zip(x, values, strict=True)):
            if value <= 0:
                continue
            top, bottom = frame.y(base[index] + value), frame.y(base[index])
            base[index] += value
            text = f"{name}, step {at:g}: {value:.3f}"
            parts.append(_bar(frame.x(at) - width / 2, top, width, bottom, color, text))
    return _figure(title, frame, parts, list(series))


def bars(title: str, values: Mapping[str, float]) -> str:
    """One bar per name, in the order given."""
    if not values or not max(values.values()):
        return _empty(title)
    frame = _Frame(0, len(values), 0.0, max(values.values()), has_x=False)
    parts = []
    for index, (name, value) in enumerate(values.items()):
        left, width = frame.x(index + 0.1), frame.x(0.8) - frame.x(0)
        text = f"{name}: {value:g}"
        parts.append(_bar(left, frame.y(value), width, frame.y(0), COLORS[0], text))
        parts.append(_below(left + width / 2, name))
    return _figure(title, frame, parts, [])


def _bar(x: float, top: float, width: float, bottom: float, color: str, text: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.2f}" '
        f'fill="{color}"><title>{escape(text)}</title></rect>'
    )


def _below(x: float, text: str) -> str:
    """A label under the chart."""
    return f'<text x="{x:.1f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(text)}</text>'


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


def _figure(title: str, frame: _Frame, parts: Sequence[str], names: Sequence[str]) -> str:
    grid = []
    for value in _ticks(frame.low, frame.high):
        y = frame.y(value)
        grid.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    if frame.has_x:
        ticks = _ticks(math.ceil(frame.left), math.floor(frame.right), 8)
        grid += [_below(frame.x(at), f"{at:g}") for at in ticks]
    legend = "".join(
        f'<span><i style="background:{color}"></i>{escape(name)}</span>'
        for color, name in zip(cycle(COLORS), names)
    )
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<text x="{_LEFT}" y="16" class="title">{escape(title)}</text>{"".join(grid)}'
        f"{''.join(parts)}</svg><figcaption>{legend}</figcaption></figure>"
    )


def _empty(title: str) -> str:
    return f"<figure><p><b>{escape(title)}</b>: no data was recorded</p></figure>"


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
