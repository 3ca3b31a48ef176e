"""Drawings of the report as SVG text: lines, stacked areas, bars and a timeline. Every text is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trainstream._timeline import Interval

__all__ = ["Lane", "Series", "chart", "lanes", "ticks"]

WIDTH, HEIGHT = 960, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 12, 10, 26
_POINTS = 600  # more than the eye or the page needs
_ROW = 26
_NAMES = 130
_TIMELINE = 1600


class Series(NamedTuple):
    """One line or area: a name, a CSS class that colours it, and a value for each x."""

    name: str
    style: str
    values: Sequence[float]


class Lane(NamedTuple):
    """One row of the timeline."""

    name: str
    style: str
    intervals: Sequence[Interval]


def ticks(low: float, high: float, *, binary: bool = False) -> list[float]:
    """Return at most six round numbers from `low` to `high`, powers of two apart if `binary`.

    Example:
        >>> ticks(0.7, 15.0)
        [5.0, 10.0, 15.0]
    """
    span = high - low
    if not span > 0.0:
        return [low]
    if binary:
        step = 2.0 ** math.ceil(math.log2(span / 5.0))
    else:
        unit = 10.0 ** math.floor(math.log10(span / 5.0))
        step = next(unit * k for k in (1, 2, 5, 10) if span / (unit * k) <= 5.0)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [index * step for index in range(first, last + 1)]


def thin(xs: Sequence[float], series: Sequence[Series]) -> tuple[list[float], list[Series]]:
    """Keep the largest value of each stretch where there are more points than can be seen."""
    if len(xs) <= _POINTS:
        return list(xs), list(series)
    size = math.ceil(len(xs) / _POINTS)
    starts = range(0, len(xs), size)
    kept = [s._replace(values=[max(s.values[i : i + size]) for i in starts]) for s in series]
    return [xs[min(i + size, len(xs)) - 1] for i in starts], kept


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def chart(
    title: str,
    xs: Sequence[float],
    series: Sequence[Series],
    *,
    x_name: str,
    write: Callable[[float], str],
    stacked: bool = False,
    binary: bool = False,
    levels: Sequence[tuple[str, float]] = (),
) -> str:
    """Draw lines, or areas on top of each other.

    Args:
        title: Above it, and what a screen reader says.
        xs: Not falling.
        series: With as many values.
        x_name: Below it.
        write: Turns a value into text.
        stacked: Areas on top of each other.
        binary: Values are bytes: the grid is at powers of two.
        levels: Named horizontal lines, such as budgets.

    Returns:
        A figure element, or a paragraph if there is nothing to draw.
    """
    used = [s for s in series if any(s.values)]
    if not xs or not used:
        return f"<p class=note>{html.escape(title)}: nothing to draw.</p>"
    xs, used = thin(xs, used)
    sums = [sum(values) for values in zip(*(s.values for s in used), strict=True)]
    top = max([*(sums if stacked else [max(s.values) for s in used]), *(v for _, v in levels)]) * 1.05 or 1.0
    low, span = xs[0], (xs[-1] - xs[0]) or 1.0
    inner, tall = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def x_of(x: float) -> float:
        return _LEFT + (x - low) / span * inner

    def y_of(y: float) -> float:
        return _TOP + tall * (1.0 - y / top)

    body = [_grid(ticks(0.0, top, binary=binary), y_of, write)]
    below = [0.0] * len(xs)
    for one in used:
        if stacked:
            above = [b + v for b, v in zip(below, one.values, strict=True)]
            edge = [(x_of(x), y_of(y)) for x, y in zip(xs, above, strict=True)]
            back = [(x_of(x), y_of(y)) for x, y in zip(xs, below, strict=True)][::-1]
            body.append(f'<path class="area {one.style}" d="{_path([*edge, *back])}z"/>')
            below = above
        else:
            line = [(x_of(x), y_of(y)) for x, y in zip(xs, one.values, strict=True)]
            line += [(line[0][0] + 1.0, line[0][1])] if len(line) == 1 else []
            body.append(f'<path class="line {one.style}" d="{_path(line)}"/>')
    for name, value in levels:
        y = y_of(value)
        body.append(f'<path class=level d="M{_LEFT} {y:.1f}h{inner}"/>')
        body.append(f'<text class=lvl x="{WIDTH - _RIGHT - 4}" y="{y - 3:.1f}">{html.escape(name)}</text>')
    body.append(_x_axis(low, span, x_name, x_of))
    return _figure(title, "".join(body), used, xs, write)


def _grid(at: Sequence[float], y_of: Callable[[float], float], write: Callable[[float], str]) -> str:
    found = []
    for tick in at:
        y = y_of(tick)
        found.append(f'<path class=grid d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        found.append(f'<text class=y x="{_LEFT - 6}" y="{y + 4:.1f}">{html.escape(write(tick))}</text>')
    return "".join(found)


def _x_axis(low: float, span: float, name: str, x_of: Callable[[float], float]) -> str:
    right, found = WIDTH - _RIGHT, []
    for tick in ticks(low, low + span):
        if x_of(tick) < right - 50:  # there the name is
            found.append(f'<text class=x x="{x_of(tick):.1f}" y="{HEIGHT - 9}">{tick:g}</text>')
    return "".join(found) + f'<text class=xn x="{right}" y="{HEIGHT - 9}">{html.escape(name)}</text>'


def _figure(
    title: str, body: str, series: Sequence[Series], xs: Sequence[float], write: Callable[[float], str]
) -> str:
    """Put legend, drawing and the texts that a script shows under the pointer together."""
    legend = "".join(f"<li class={s.style}>{html.escape(s.name)}</li>" for s in series)
    told = [
        f"{x:g}: " + ", ".join(f"{s.name} {write(s.values[i])}" for s in series) for i, x in enumerate(xs)
    ]
    places = ",".join(f"{(x - xs[0]) / ((xs[-1] - xs[0]) or 1.0):.4f}" for x in xs)
    return (
        f"<figure class=chart><figcaption>{html.escape(title)}</figcaption><ul class=legend>{legend}</ul>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role=img aria-label="{html.escape(title)}" '
        f'data-left="{_LEFT}" data-right="{_RIGHT}" data-x="{places}" '
        f'data-text="{html.escape(chr(10).join(told))}">{body}'
        f'<path class=cross d="M0 {_TOP}V{HEIGHT - _BOTTOM}"/></svg><output>&nbsp;</output></figure>'
    )


def lanes(title: str, rows: Sequence[Lane], windows: Sequence[Interval]) -> str:
    """Draw a timeline: one row for each lane, a mark where each step begins.

    Args:
        title: Above it.
        rows: The lanes; intervals in nanoseconds.
        windows: The steps.

    Returns:
        A figure element.
    """
    if not windows:
        return f"<p class=note>{html.escape(title)}: no step was found in the trace.</p>"
    low, high = windows[0][0], windows[-1][1]
    scale = (_TIMELINE - _NAMES) / max(high - low, 1)
    height = 24 + _ROW * len(rows)
    names, body = [], []
    for index, lane in enumerate(rows):
        y = 20 + _ROW * index
        names.append(f'<text x="4" y="{y + 14}">{html.escape(lane.name)}</text>')
        body.append(f'<path class="bar {lane.style}" d="{_bars(lane.intervals, y, scale, low, high)}"/>')
    for number, (start, end) in enumerate(windows):
        x = _NAMES + (start - low) * scale
        body.append(f'<path class=level d="M{x:.2f} 4V{height}"/>')
        label = f"step {number + 1}: {(end - start) / 1e6:.1f} ms"
        body.append(f'<text x="{x + 3:.1f}" y="13">{html.escape(label)}</text>')
    return (
        f"<figure class=timeline><figcaption>{html.escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {_TIMELINE} {height}" role=img aria-label="{html.escape(title)}">'
        f"<g>{''.join(names)}</g>"
        f'<svg x="{_NAMES}" width="{_TIMELINE - _NAMES}" height="{height}" class=zoom '
        f'viewBox="{_NAMES} 0 {_TIMELINE - _NAMES} {height}" preserveAspectRatio="none" '
        f'data-ms="{(high - low) / 1e6:.6f}"><rect x="{_NAMES}" width="{_TIMELINE - _NAMES}" '
        f'height="{height}" fill="transparent"/>{"".join(body)}</svg></svg>'
        "<output>wheel or + and - zooms, dragging moves, a double click shows all</output></figure>"
    )


def _bars(intervals: Sequence[Interval], y: int, scale: float, low: int, high: int) -> str:
    """One path for all rectangles of a lane; what is nearer than a tenth of a pixel is drawn as one."""
    near = 0.1 / scale
    joined: list[list[int]] = []
    for start, end in intervals:
        start, end = max(start, low), min(end, high)
        if start >= end:
            continue
        if joined and start - joined[-1][1] < near:
            joined[-1][1] = end
        else:
            joined.append([start, end])
    return "".join(
        f"M{_NAMES + (start - low) * scale:.2f} {y}h{max((end - start) * scale, 0.05):.2f}v18"
        f"h-{max((end - start) * scale, 0.05):.2f}z"
        for start, end in joined
    )
