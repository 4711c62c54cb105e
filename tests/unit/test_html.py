"""Reports as HTML: one file, everything escaped, every list bounded, plots that hold any values."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvatlas.report import html, plots
from kvatlas.report.axes import Axis, Scale, number
from kvatlas.report.html import (
    Figure,
    Markup,
    badge,
    bullets,
    code,
    details,
    figures,
    page,
    section,
    table,
)
from kvatlas.report.plots import Bars, Line, Mark, bar_plot, distribution_plot, line_plot

VOID = {"meta"}
NASTY = '<script>alert(\'x\')</script> " onload="x()" </style> & \x00 \ud800 ]]>'
RATE, TTFT = Axis("rate", "requests/s"), Axis("TTFT", "s")


class Tree(HTMLParser):
    """Elements in order as far as they nest, and all attributes. Raises where they do not."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1:] != ["style"]:
            self.words.append(data.strip())


def whole(*parts: html.Part) -> str:
    return page("Bench", [section("Result", *parts)], subtitle="two rounds")


def every_part(text: str) -> list[html.Part]:
    """One of everything that a report is made of, ``text`` wherever text may stand."""
    line = Line(text, [(1, 2), (2, 3)], [(1, 1), (2, 2)], [(1, 3), (2, 4)], dots=True)
    axes = Axis(text, text), Axis(text, text, log=True)
    return [
        text,
        bullets([text, badge(text, "good")]),
        code(text),
        figures([Figure(text, text, text)]),
        table([text, "b"], [[text, badge("pass")]], caption=text, numbers_from=1),
        details(text, text),
        line_plot(text, [line], *axes, marks=[Mark(text, 2, "x"), Mark(text, 2, "y")], note=text),
        distribution_plot(text, [(text, [1, 2, 2, 5])], axes[0], note=text),
        bar_plot(text, [text], [Bars(text, [3], [(2, 4)]), Bars("b", [None])], axes[0], note=text),
    ]


def test_a_page_has_this_structure() -> None:
    tree = Tree(whole(*every_part("x")))
    plain = [tag for tag in tree.seen if tag not in {"path", "text", "title"}]
    told = [f"{tag} {len(list(run))}" for tag, run in itertools.groupby(plain)]
    assert " ".join(told) == (
        "html 1 head 1 meta 4 style 1 body 1 main 1 h1 1 p 1 section 1 h2 1 p 1 ul 1 li 2 span 1 "
        "pre 1 div 6 table 1 caption 1 thead 1 tr 1 th 2 tbody 1 tr 1 td 2 span 1 "
        "details 1 summary 1 p 1 "
        "figure 1 figcaption 1 span 1 svg 1 polygon 1 polyline 1 circle 2 "
        "figure 1 figcaption 1 span 1 svg 1 polygon 1 polyline 1 "
        "figure 1 figcaption 1 span 1 div 1 span 1 svg 1 rect 1 span 1 svg 1 rect 1 svg 1 rect 1"
    )
    assert tree.words[:3] == ["Bench", "Bench", "two rounds"]


@pytest.mark.parametrize("text", [NASTY, "x" * 20_000, ""])
def test_nothing_but_text_comes_of_text(text: str) -> None:
    made, plain = Tree(whole(*every_part(text))), Tree(whole(*every_part("x")))
    skip = {"span", "div", "caption", "title"}  # for what is empty, or was cut
    assert [t for t in made.seen if t not in skip] == [t for t in plain.seen if t not in skip]
    whole(*every_part(text)).encode()
    assert {name for name, _ in made.attributes} == {name for name, _ in plain.attributes}


def test_a_page_loads_nothing_and_runs_nothing() -> None:
    text = whole(*every_part("x"))
    tree = Tree(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(tree.seen)
    assert not [n for n, _ in tree.attributes if n in {"src", "href"} or n.startswith("on")]
    assert "url(" not in text
    assert "://" not in text
    assert dict(tree.attributes)["content"] == "default-src 'none'; style-src 'unsafe-inline'"
    assert "prefers-color-scheme:dark" in text
    names = set(re.findall(r"var\((--\w+)\)", text))
    light, dark = (set(re.findall(r"(--\w+):", b)) for b in re.findall(r":root\{([^}]*)\}", text))
    assert names <= light == dark


def test_what_is_too_long_is_cut_and_that_is_said() -> None:
    assert "… (4,001 characters)" in html.escaped("x" * (html.TEXT_MAX + 1))
    assert code("x" * (html.CODE_MAX + 1)).endswith("… (100,001 characters)</pre>")
    long = table(["a"], [["1"]] * (html.ROWS_MAX + 7))
    assert long.count("<tr>") == html.ROWS_MAX + 1
    assert "7 more rows are not shown." in long
    line = Line("l", [(x, x) for x in range(plots.POINTS_MAX * 3)])
    drawn = line_plot("t", [line] * (plots.SERIES_MAX + 2), RATE, TTFT)
    assert drawn.count("<polyline") == plots.SERIES_MAX
    assert "Not drawn: 2 series." in drawn
    assert max(len(p.split()) for p in re.findall(r'points="([^"]*)"', drawn)) <= (
        plots.POINTS_MAX + 1
    )
    bars = bar_plot("t", ["g"] * 100, [Bars("b", [1.0] * 100)], TTFT)
    assert bars.count("<rect") == plots.BARS_MAX
    assert "Not drawn: 36 groups." in bars


def test_a_table_whose_rows_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        table(["a", "b"], [["1"]])


def test_plots_say_what_they_cannot_show() -> None:
    logged = Axis("TTFT", "s", log=True)
    assert "no values" in line_plot("t", [Line("l", ())], RATE, TTFT)
    assert "no values" in distribution_plot("t", [("l", [])], TTFT)
    assert "no values" in bar_plot("t", ["g"], [Bars("b", [None])], TTFT)
    some = line_plot("t", [Line("l", [(1, 0), (1, float("nan")), (2, 3), (3, 4)])], RATE, logged)
    assert "Not drawn: 2 points that these axes cannot show." in some
    bars = bar_plot("t", ["g", "h"], [Bars("b", [None, 2.0])], TTFT)
    assert bars.count("not shown") == 1
    with pytest.raises(ValueError, match="1 values for 2 groups"):
        bar_plot("t", ["g", "h"], [Bars("b", [1.0])], TTFT)


def test_points_between_which_nothing_is_known_are_not_joined() -> None:
    lines = [Line(name, [(1, 2), (2, 1)], joined=False) for name in "ab"]
    drawn = line_plot("t", lines, RATE, TTFT)
    assert drawn.count("<circle") == 4
    assert "<polyline" not in drawn
    assert "stroke-dasharray" not in drawn, "nor are their names marked by lines"


def test_axes_and_values_are_named_with_their_units() -> None:
    words = Tree(whole(bar_plot("t", ["p50"], [Bars("a", [0.25], [(0.2, 0.3)])], TTFT))).words
    assert "TTFT (s)" in words
    assert "a: 0.25 s (0.2 to 0.3)" in words
    lines = [Line("a", [(2, 0.25)])]
    words = Tree(whole(line_plot("t", lines, RATE, TTFT, marks=[Mark("SLO", 1, "y")]))).words
    assert {"rate (requests/s)", "TTFT (s)", "SLO", "a: 0.25 s at 2 requests/s"} <= set(words)


def test_a_distribution_is_a_stair_with_a_band() -> None:
    drawn = distribution_plot("t", [("a", [1.0, 3.0, 2.0])], Axis("x", low=0, high=10))
    (stair,) = re.findall(r'polyline [^>]*points="([^"]*)"', drawn)
    points = [tuple(map(float, p.split(","))) for p in stair.split()]
    assert [p[0] for p in points[::2]] == [p[0] for p in points[1::2]]
    assert points[0][1] == pytest.approx(274)  # 0 %, at the foot
    assert points[-1][1] == pytest.approx(14)  # 100 %, at the top
    assert drawn.count("<polygon") == 1


@given(st.lists(st.floats(), min_size=1, max_size=20), st.booleans())
@example([1.0, 1000000000000001.0], True)  # whose logarithm is rounded down
@example([1.0, 1e13], True)
def test_any_values_find_a_place(values: list[float], log: bool) -> None:
    axis = Axis("x", log=log)
    shown = [v for v in values if axis.shows(v)]
    scale = Scale(axis, values, 0, 100)
    assert 2 <= len(scale.ticks) <= 14
    assert scale.ticks == sorted(set(scale.ticks))
    for value in [*shown, *scale.ticks]:
        assert -1e-6 <= scale.at(value) <= 100 + 1e-6
    Tree(whole(line_plot("t", [Line("l", [(v, v) for v in values])], axis, axis)))
    Tree(whole(bar_plot("t", ["g"] * len(values), [Bars("b", values)], axis)))


def test_round_numbers_on_the_axes() -> None:
    assert Scale(TTFT, [0.13, 0.9], 0, 1).ticks == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert Scale(Axis("x", log=True), [0.03, 0.4], 0, 1).ticks == pytest.approx(
        [0.02, 0.05, 0.1, 0.2, 0.5]
    )
    assert [number(v) for v in (0, 1234.5678, 0.012345, 1e-7, 3e12, 17, 1_000_000)] == [
        "0", "1,235", "0.01235", "1e-07", "3e+12", "17", "1,000,000",
    ]  # fmt: skip
    assert isinstance(section("t", "x"), Markup)
