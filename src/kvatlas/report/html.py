"""A report as one HTML file that needs nothing else: no script, no font, no address. Pure.

A page is made of sections, a section of parts: plain text (escaped, as a paragraph) or what the
functions here and in `plots.py` made. Light and dark follow the reader's own setting. A policy in
the page's head forbids scripts and anything from elsewhere, whatever the text says.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Literal

import msgspec

from kvatlas.report.text import harmless

TEXT_MAX = 4000  # characters of one text or cell: the rest is cut, and that is said
ROWS_MAX = 1000  # of one table
CODE_MAX = 100_000  # characters

Tone = Literal["good", "bad", "warn", "plain"]


class Markup(str):
    """Text that is HTML already, everything in it escaped. Any other text is not."""

    __slots__ = ()


Part = Markup | str


class Figure(msgspec.Struct, frozen=True):
    """One key figure: ``value`` with its unit, as text; ``note`` says what it rests on."""

    name: str
    value: str
    note: str = ""
    tone: Tone = "plain"


def page(title: str, sections: Sequence[Markup], *, subtitle: str = "") -> str:
    """The whole file. ``subtitle``: what was examined, when, with which version."""
    below = f"<p class=sub>{escaped(subtitle)}</p>" if subtitle else ""
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        f"<title>{escaped(title)}</title>\n"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        '<meta name=color-scheme content="light dark">\n'
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; "
        "style-src 'unsafe-inline'\">\n"
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escaped(title)}</h1>\n{below}\n" + "\n".join(sections) + "\n</main>\n</body>\n"
        "</html>\n"
    )


def section(title: str, *parts: Part) -> Markup:
    """A titled section; a part that is plain text becomes a paragraph."""
    return Markup(f"<section>\n<h2>{escaped(title)}</h2>\n{_joined(parts)}\n</section>")


def details(title: str, *parts: Part) -> Markup:
    """Parts that are folded away until somebody opens them."""
    return Markup(f"<details>\n<summary>{escaped(title)}</summary>\n{_joined(parts)}\n</details>")


def bullets(items: Sequence[Part]) -> Markup:
    """A list; nothing where it is empty."""
    if not items:
        return Markup("")
    return Markup("<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in items) + "</ul>")


def assumed(items: Sequence[str]) -> Markup:
    """What nobody gave and was taken for given; nothing where that is nothing."""
    said = "<p>Assumed, because nobody gave it:</p>" if items else ""
    return Markup(said + bullets(items))


def code(text: str) -> Markup:
    """Commands, output or evidence as they are, line for line."""
    return Markup(f"<pre>{escaped(text, CODE_MAX)}</pre>")


def badge(text: str, tone: Tone = "plain") -> Markup:
    """A verdict in a word or two; the word says it, its colour only helps to find it."""
    return Markup(f'<span class="badge {tone}">{escaped(text)}</span>')


def figures(items: Sequence[Figure]) -> Markup:
    """Key figures side by side."""
    tiles = "".join(
        f'<div class="tile {item.tone}"><div class=name>{escaped(item.name)}</div>'
        f"<div class=value>{escaped(item.value)}</div>"
        f"<div class=note>{escaped(item.note)}</div></div>"
        for item in items
    )
    return Markup(f"<div class=tiles>{tiles}</div>")


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Part]],
    *,
    numbers_from: int | None = None,
    caption: str = "",
) -> Markup:
    """Rows under column heads; columns from ``numbers_from`` on are set flush right.

    Raises ValueError for a row of another length. More than ``ROWS_MAX`` rows are cut, and said so.
    """
    right = len(columns) if numbers_from is None else numbers_from
    kinds = [" class=n" if index >= right else "" for index in range(len(columns))]
    heads = "".join(
        f"<th scope=col{kind}>{escaped(name)}</th>"
        for name, kind in zip(columns, kinds, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{_inline(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        + "</tr>\n"
        for row in rows[:ROWS_MAX]
    )
    notes = [caption] if caption else []
    if len(rows) > ROWS_MAX:
        notes.append(f"{len(rows) - ROWS_MAX:,} more rows are not shown.")
    said = f"<caption>{escaped(' '.join(notes))}</caption>" if notes else ""
    return Markup(
        f"<div class=wide><table>{said}<thead><tr>{heads}</tr></thead>\n"
        f"<tbody>{body}</tbody></table></div>"
    )


def escaped(text: str, characters_max: int = TEXT_MAX) -> str:
    """Text that may stand anywhere in a page, attributes in quotes included: cut where it is too
    long, what no page may contain replaced."""
    if len(text) > characters_max:
        text = f"{text[:characters_max]}… ({len(text):,} characters)"
    return html.escape(harmless(text))


def _inline(part: Part) -> str:
    return part if isinstance(part, Markup) else escaped(part)


def _joined(parts: Sequence[Part]) -> str:
    return "\n".join(p if isinstance(p, Markup) else f"<p>{escaped(p)}</p>" for p in parts)


# Colours of series: told apart by all common kinds of colour blindness (after Okabe and Ito).
_STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#1c1e21;--soft:#5d646d;--line:#dcdfe3;
--good:#1a7f4b;--bad:#c0362c;--warn:#96610a;--s0:#0072b2;--s1:#d55e00;--s2:#00835f;--s3:#b0549a;
--s4:#a37200;--s5:#3f8fc4;--s6:#6b5bd0;--s7:#6d6d6d}
@media (prefers-color-scheme:dark){:root{--bg:#15171a;--card:#1d2024;--ink:#e6e8ea;--soft:#9aa3ad;
--line:#343a41;--good:#4cc38a;--bad:#ff7b70;--warn:#e0a93f;--s0:#4fb0ea;--s1:#ff9350;--s2:#3ecb9f;
--s3:#e59ad2;--s4:#e8bd45;--s5:#9bd0f5;--s6:#a99cff;--s7:#b4b4b4}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:26px;line-height:1.25;margin:0 0 4px}
h2{font-size:18px;margin:0 0 12px}
.sub{color:var(--soft);margin:0 0 20px}
p{max-width:80ch;margin:8px 0;overflow-wrap:anywhere}
section{background:var(--card);border:1px solid var(--line);border-radius:8px;
padding:18px 20px;margin:16px 0}
.wide{overflow-x:auto;margin:12px 0}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
caption{caption-side:bottom;text-align:left;color:var(--soft);font-size:13px;padding-top:6px}
th,td{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--line);
vertical-align:top;overflow-wrap:break-word}
th{font-weight:600;color:var(--soft);font-size:13px}
th:first-child,td:first-child{min-width:8em;overflow-wrap:break-word}
.n{text-align:right;white-space:nowrap}
td.n{overflow-wrap:normal}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:12px;margin:12px 0}
.tile{border:1px solid var(--line);border-radius:6px;padding:10px 12px;overflow-wrap:anywhere}
.name,.note{color:var(--soft);font-size:13px}
.value{font-size:22px;line-height:1.3;font-variant-numeric:tabular-nums}
.tile.good .value{color:var(--good)}.tile.bad .value{color:var(--bad)}
.tile.warn .value{color:var(--warn)}
.badge{display:inline-block;border:1px solid currentColor;border-radius:10px;padding:0 8px;
font-size:13px;font-weight:600;white-space:nowrap}
.badge.good{color:var(--good)}.badge.bad{color:var(--bad)}.badge.warn{color:var(--warn)}
.badge.plain{color:var(--soft)}
pre{overflow-x:auto;background:var(--bg);border:1px solid var(--line);border-radius:6px;
padding:10px 12px;font:13px/1.45 ui-monospace,Menlo,Consolas,monospace}
details{margin:12px 0}summary{cursor:pointer;color:var(--soft)}
figure{margin:16px 0;overflow-x:auto}
figcaption{font-weight:600;margin-bottom:4px}
figcaption span{display:block;font-weight:400;color:var(--soft);font-size:13px;max-width:80ch}
.key{display:flex;flex-wrap:wrap;gap:2px 18px;font-size:13px;margin:4px 0}
.key svg{width:26px;height:10px;margin-right:6px}
.plot{display:block;width:100%;min-width:560px;max-width:960px;height:auto;font-size:12px}
.plot text{fill:var(--soft)}.plot .ink{fill:var(--ink)}
.grid{stroke:var(--line)}.axis{stroke:var(--soft)}
.mark{stroke:var(--ink);stroke-dasharray:2 3}
.series{fill:none;stroke-width:2}.whisker{stroke:var(--ink);stroke-width:1.5}
@media print{body{background:none}section{break-inside:avoid}}
""" + "".join(f".l{i}{{stroke:var(--s{i})}}.f{i}{{fill:var(--s{i})}}" for i in range(8))
