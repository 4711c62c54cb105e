"""Plots as inline SVG for `html.page`: lines with bands, distributions, bars with whiskers. Pure.

Of our own, because the libraries that draw bands either weigh as much as kvatlas itself or need a
script in the page. Colours come from the page's style, so a plot is right in light and dark; a
series is also told by its dashes. Points and bars name their values when pointed at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeGuard

import msgspec

from kvatlas.report.axes import Axis, Scale, number
from kvatlas.report.html import Markup, escaped

POINTS_MAX = 1000  # of one drawn line: more are thinned out
SERIES_MAX = 8
BARS_MAX = 64
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 320, 76, 24, 14, 46
_NAMES, _BAR, _GAP = 230, 16, 12  # of bars: room for names, height of one, space between groups
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 4", "1 4", "9 3 2 3 2 3")

_NOTHING = "<p>Nothing to draw: there are no values.</p>"

Point = tuple[float, float]


class Line(msgspec.Struct, frozen=True):
    """Points from left to right; a band is drawn between the lines ``low`` and ``high``. Not
    ``joined``: points alone, between which nothing is known."""

    name: str
    points: Sequence[Point]
    low: Sequence[Point] = ()
    high: Sequence[Point] = ()
    dots: bool = False
    joined: bool = True


class Mark(msgspec.Struct, frozen=True):
    """A limit or a place on one of the axes, with its name."""

    text: str
    value: float
    axis: Literal["x", "y"]


class Bars(msgspec.Struct, frozen=True):
    """One value per group; None where there is none. ``spans``: the interval of each, or None."""

    name: str
    values: Sequence[float | None]
    spans: Sequence[tuple[float, float] | None] = ()


def line_plot(
    title: str,
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    marks: Sequence[Mark] = (),
    note: str = "",
) -> Markup:
    """Lines over two axes. What cannot be drawn (no number, too many series) is said below."""
    drawn = [_drawable(line, x, y) for line in lines[:SERIES_MAX]]
    every = [p for line in drawn for p in (*line.points, *line.low, *line.high)]
    if not every:
        return _figure(title, note, "", _NOTHING)
    lost = sum(not x.shows(a) or not y.shows(b) for line in lines for a, b in line.points)
    on_x, on_y = _within(marks, "x"), _within(marks, "y")
    across = Scale(x, [p[0] for p in every] + on_x, _LEFT, _WIDTH - _RIGHT)
    up = Scale(y, [p[1] for p in every] + on_y, _HEIGHT - _BOTTOM, _TOP)
    body = [_x_axis(across, _HEIGHT - _BOTTOM, _TOP), _y_axis(up)]
    body += [_series(line, index, across, up) for index, line in enumerate(drawn)]
    body += [_mark(mark, i, across if mark.axis == "x" else up) for i, mark in enumerate(marks)]
    left = {"points that these axes cannot show": lost, "series": len(lines) - SERIES_MAX}
    key = ""
    if len(drawn) > 1:
        key = _key([line.name for line in drawn], filled=not any(line.joined for line in drawn))
    return _figure(title, _notes(note, left), key, _svg(_HEIGHT, title, body))


def distribution_plot(
    title: str, samples: Sequence[tuple[str, Sequence[float]]], x: Axis, *, note: str = ""
) -> Markup:
    """The share of values up to each value, per named sample.

    The bands hold the true curve with 95 % where values are independent (Dvoretzky, Kiefer,
    Wolfowitz): wide for few values.
    """
    lines = [_cumulative(name, sorted(filter(math.isfinite, values))) for name, values in samples]
    said = f"{note} Bands: 95 %, were all values independent.".strip()
    return line_plot(title, lines, x, Axis("share", "%", low=0, high=100), note=said)


def bar_plot(
    title: str, groups: Sequence[str], bars: Sequence[Bars], along: Axis, *, note: str = ""
) -> Markup:
    """Groups of horizontal bars, one bar per series, with whiskers where there is an interval.

    Raises ValueError where a series has not one value per group.
    """
    for each in bars:
        if len(each.values) != len(groups) or len(each.spans) not in (0, len(groups)):
            raise ValueError(f"{each.name}: {len(each.values)} values for {len(groups)} groups")
    kept = bars[:SERIES_MAX]
    shown = groups[: max(1, BARS_MAX // max(1, len(kept)))]
    values = [v for each in kept for v in each.values[: len(shown)] if _finite(v)]
    spans = [v for each in kept for span in each.spans[: len(shown)] if span for v in span]
    if not values:
        return _figure(title, note, "", _NOTHING)
    height = _TOP + len(shown) * (len(kept) * _BAR + _GAP) + _BOTTOM
    ends = [v for v in (*values, *spans) if math.isfinite(v)]
    scale = Scale(along, ends if along.log else [0.0, *ends], _NAMES, _WIDTH - _RIGHT - 60)
    body = [_x_axis(scale, height - _BOTTOM, _TOP)]
    for row, group in enumerate(shown):
        top = _TOP + row * (len(kept) * _BAR + _GAP) + _GAP / 2
        middle = top + len(kept) * _BAR / 2 + 4
        body.append(_words(_NAMES - 10, middle, _short(group, 34), "end", "ink", full=group))
        body += [_bar(e, row, i, top + i * _BAR, scale) for i, e in enumerate(kept)]
    said = _notes(note, {"series": len(bars) - len(kept), "groups": len(groups) - len(shown)})
    key = _key([each.name for each in kept], filled=True) if len(kept) > 1 else ""
    return _figure(title, said, key, _svg(height, title, body))


def _drawable(line: Line, x: Axis, y: Axis) -> Line:
    """The line without points that the axes cannot show, thinned to ``POINTS_MAX``."""

    def kept(points: Sequence[Point]) -> list[Point]:
        good = [p for p in points if x.shows(p[0]) and y.shows(p[1])]
        step = -(-len(good) // POINTS_MAX) or 1
        return good[::step] + good[-1:] * ((len(good) - 1) % step > 0)

    return Line(
        line.name, kept(line.points), kept(line.low), kept(line.high), line.dots, line.joined
    )


def _finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _within(marks: Sequence[Mark], axis: str) -> list[float]:
    return [mark.value for mark in marks if mark.axis == axis and math.isfinite(mark.value)]


def _cumulative(name: str, ordered: Sequence[float]) -> Line:
    count = len(ordered)
    if not count:
        return Line(name, ())
    steps = [(v, (i + up) / count * 100) for i, v in enumerate(ordered) for up in (0, 1)]
    off = math.sqrt(math.log(2 / 0.05) / (2 * count)) * 100
    low = [(v, max(0.0, share - off)) for v, share in steps]
    return Line(name, steps, low, [(v, min(100.0, share + off)) for v, share in steps])


def _series(line: Line, index: int, across: Scale, up: Scale) -> str:
    def path(points: Sequence[Point]) -> str:
        return " ".join(f"{across.at(a):.1f},{up.at(b):.1f}" for a, b in points)

    out = ""
    if line.low and line.high:
        edge = path([*line.low, *reversed(line.high)])
        out += f'<polygon class=f{index} fill-opacity=".14" points="{edge}"/>'
    if line.joined:
        dash = f' stroke-dasharray="{_DASHES[index]}"' if _DASHES[index] else ""
        out += f'<polyline class="series l{index}"{dash} points="{path(line.points)}"/>'
    if line.dots or not line.joined or len(line.points) == 1:
        for a, b in line.points:
            said = f"{line.name}: {number(b)} {up.axis.unit} at {number(a)} {across.axis.unit}"
            out += (
                f'<circle class=f{index} cx="{across.at(a):.1f}" cy="{up.at(b):.1f}" r="4">'
                f"<title>{escaped(said)}</title></circle>"
            )
    return out


def _bar(bars: Bars, row: int, index: int, top: float, scale: Scale) -> str:
    value, middle = bars.values[row], top + _BAR / 2
    span = bars.spans[row] if bars.spans else None
    if not _finite(value) or not scale.axis.shows(value):
        return _words(_NAMES + 6, middle + 4, "not shown", "start", "")
    start = scale.at(scale.ticks[0] if scale.axis.log else 0.0)
    end = scale.at(value)
    said = f"{bars.name}: {number(value)} {scale.axis.unit}"
    right, out = max(start, end), ""
    if span and all(_finite(v) and scale.axis.shows(v) for v in span):
        low, high = scale.at(span[0]), scale.at(span[1])
        said += f" ({number(span[0])} to {number(span[1])})"
        right = max(right, high)
        out = f'<path class=whisker d="M{low:.1f} {middle}H{high:.1f}'
        out += "".join(f"M{x:.1f} {middle - 3}v6" for x in (low, high)) + '"/>'
    return (
        f'<rect class=f{index} x="{min(start, end):.1f}" y="{top + 1:.1f}" height="{_BAR - 2}" '
        f'width="{abs(end - start):.1f}"><title>{escaped(said)}</title></rect>{out}'
        + _words(right + 6, middle + 4, number(value), "start", "ink")
    )


def _mark(mark: Mark, index: int, scale: Scale) -> str:
    """One limit; names of neighbours stand below each other."""
    if not scale.axis.shows(mark.value):
        return ""
    at, foot, right = scale.at(mark.value), _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    if mark.axis == "y":
        line, x, y, anchor = f"M{_LEFT} {at:.1f}H{right}", right - 4.0, at - 5, "end"
    else:
        y = _TOP + 12 + 14 * (index % 8)
        line, x, anchor = f"M{at:.1f} {_TOP}V{foot}", at + 5, "start"
        if at > _WIDTH / 2:
            x, anchor = at - 5, "end"
    return f'<path class=mark d="{line}"/>{_words(x, y, mark.text, anchor, "ink")}'


def _x_axis(scale: Scale, foot: float, top: float) -> str:
    left, right = scale.at(scale.ticks[0]), scale.at(scale.ticks[-1])
    out = f'<path class=axis d="M{left:.1f} {foot}H{right:.1f}"/>'
    for tick in scale.ticks:
        x = scale.at(tick)
        out += f'<path class=grid d="M{x:.1f} {foot}V{top}"/>'
        said = number(tick)
        room = x + len(said) * 3.5 <= _WIDTH  # half of its width
        out += _words(x if room else _WIDTH, foot + 16, said, "middle" if room else "end", "")
    return out + _words((left + right) / 2, foot + 36, scale.axis.title, "middle", "ink")


def _y_axis(scale: Scale) -> str:
    out = ""
    for tick in scale.ticks:
        y = scale.at(tick)
        out += f'<path class=grid d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
        out += _words(_LEFT - 8, y + 4, number(tick), "end", "")
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    turned = f' transform="rotate(-90 16 {middle})"'
    return out + _words(16, middle, scale.axis.title, "middle", "ink", more=turned)


def _words(
    x: float, y: float, text: str, anchor: str, kind: str, *, full: str = "", more: str = ""
) -> str:
    style = f" class={kind}" if kind else ""
    whole = f"<title>{escaped(full)}</title>" if full and full != text else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text{style} {place}{more}>{escaped(text)}{whole}</text>"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _key(names: Sequence[str], *, filled: bool = False) -> str:
    items = ""
    for i, name in enumerate(names):
        line = f'<path class="series l{i}" stroke-dasharray="{_DASHES[i]}" d="M0 5H26"/>'
        shape = f'<rect class=f{i} width="26" height="10"/>' if filled else line
        items += f"<span><svg aria-hidden=true>{shape}</svg>{escaped(name)}</span>"
    return f"<div class=key>{items}</div>"


def _notes(note: str, left_out: Mapping[str, int]) -> str:
    more = [f"Not drawn: {count} {what}." for what, count in left_out.items() if count > 0]
    return " ".join([*([note] if note else []), *more])


def _svg(height: float, title: str, body: Sequence[str]) -> str:
    return (
        f'<svg class=plot role=img viewBox="0 0 {_WIDTH} {height:.0f}" '
        f'aria-label="{escaped(title)}">{"".join(body)}</svg>'
    )


def _figure(title: str, note: str, key: str, plot: str) -> Markup:
    said = f"<span>{escaped(note)}</span>" if note else ""
    return Markup(f"<figure><figcaption>{escaped(title)}{said}</figcaption>{key}{plot}</figure>")
