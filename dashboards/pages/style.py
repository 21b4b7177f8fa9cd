"""CSS and small HTML elements for which Streamlit has no component. Pure.

Colours are `light-dark()` pairs with a contrast of at least 4.5:1 against the page, so they follow the active theme. A
state has a glyph, a name and a colour; colour is never the only cue. All text goes through `text.escape`.
"""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from rolecall.core.text import escape, seconds
from rolecall.dashboards.data.run_state import GLYPHS

STATES = {
    "lost": ("✕", "#b3261e", "#ff8a80"),
    "suspect": ("▲", "#a34700", "#ffb066"),
    "being replaced": ("↻", "#1a56c4", "#8ab4ff"),
    "quarantined": ("⊘", "#8a2f8a", "#e3a1e3"),
    "starting": ("◔", "#7a5b00", "#e5c34d"),
    "lent": ("⇄", "#1f5f8b", "#8cc8f0"),
    "standby": ("○", "#4b5563", "#aab4c0"),
    "healthy": ("●", "#00694f", "#4fd1a5"),
    "ended": ("·", "#4b5563", "#aab4c0"),
}
"""Worst first: glyph, light colour, dark colour. Neighbours differ in lightness, so colour-blind users can tell them
apart; glyph and name differ in any case."""

_KINDS = {
    "bad": ("#b3261e", "#ff8a80", "#fdecea", "#3a1917"),
    "warn": ("#8a5a00", "#f0b040", "#fff4dc", "#33270d"),
    "note": ("#1a56c4", "#8ab4ff", "#e9f0fd", "#16233b"),
    "good": ("#00694f", "#4fd1a5", "#e3f4ec", "#14301f"),
}
ICONS = {"bad": "▲", "warn": "!", "note": "i", "good": "✓"}

SERVER_LOST = (
    "The server of this dashboard does not answer. The job and its recovery do not need it.\\A "
    "1. In the terminal where rolecall dashboard was started, read why it ended, then start it again with the same "
    "options.\\A "
    "2. Until then, the commands rolecall status RUN and rolecall incidents --run RUN show the same in a terminal.\\A "
    "This page reconnects by itself."
)
"""Replaces the text of Streamlit's dialog, which is about Streamlit. The only dialog of the dashboard without a form."""

LOST_TITLE = """<script>window.rolecallTitle ??= setInterval(() => {
  const lost = document.querySelector('[role="dialog"] > h2 + div > div:not(:has(input, button))');
  if (lost && !document.title.startsWith("? ")) document.title = "? disconnected · " + document.title;
}, 1000)</script>"""
"""Without it the tab keeps the last known state while the server is gone. The next draw of the page sets it again."""

CLOSE_MENU = """<script>window.rolecallMenu ??= (document.addEventListener("click", event => {
  if (matchMedia("(max-width: 767px)").matches && event.target.closest('[data-testid="stSidebar"] a'))
    document.querySelector('[data-testid="stSidebarCollapseButton"] button')?.click();
}), true)</script>"""
"""On a phone the menu covers the page; a link in it closes it."""

_CSS = """
:root { --soft: light-dark(#55616f, #a3afbb); --line: light-dark(#dde2e8, #333c46); --ink: light-dark(#16202c, #e6ebf1);
  --card: light-dark(#ffffff, #171b20); --shade: light-dark(#f5f7f9, #1b2026); }
[data-testid="stMainBlockContainer"] { padding: 3.2rem 2rem 3rem; }
[data-testid="stMain"] h1 { padding: 0; } [data-testid="stMain"] h3 { padding: .6rem 0 .35rem; }
[data-testid="stMain"] [data-testid="stVerticalBlock"] { gap: .75rem; }
.rc { font-variant-numeric: tabular-nums; line-height: 1.45; overflow-wrap: break-word; }
[data-testid="stCaptionContainer"], [data-testid="stCaptionContainer"] * { color: var(--soft) !important; opacity: 1 !important; }
.rc a { color: light-dark(#1a56c4, #8ab4ff); }
.rc-soft { color: var(--soft); }
.rc-run { color: var(--soft); margin: 0; }
.rc-state { display: flex; flex-wrap: wrap; align-items: baseline; gap: .1rem .7rem; border: 1px solid var(--line);
  border-left: 4px solid; border-radius: 6px; padding: .5rem .8rem; margin: 0; }
.rc-state b { font-size: 1.1rem; } .rc-state span { color: var(--soft); } .rc-state span::before { content: "· "; }
.rc-banner { border-left: 4px solid; border-radius: 6px; padding: .55rem .8rem; margin: 0; }
.rc-banner b { margin-right: .4rem; } .rc-banner p { margin: .15rem 0 0; color: var(--ink); }
.rc-figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .75rem;
  margin: 0 !important; padding: 0 !important; }
.rc-figures div { border: 1px solid var(--line); border-radius: 6px; padding: .5rem .75rem; background: var(--card); }
.rc-figures dt { font-size: .85rem; color: var(--soft); }
.rc-figures dd { margin: 0; font-size: 1.45rem; font-weight: 600; line-height: 1.3; }
.rc-figures dd + dd { font-size: .85rem; font-weight: 400; color: var(--soft); }
[class*="st-key-card-"] { border-left: 4px solid var(--line); }
[class*="st-key-card-"] [data-testid="stPageLink"] a { border: 1px solid var(--line); border-radius: 6px;
  padding: .25rem .7rem; }
.rc-card header { display: flex; flex-wrap: wrap; gap: .2rem .7rem; align-items: baseline; }
.rc-card .title { font-size: 1.25rem; font-weight: 600; margin: 0; padding: 0; color: var(--ink); }
.rc-card .title i { font-style: normal; } .rc-card p { margin: .3rem 0 .4rem; }
.rc-card dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0 !important;
  padding: 0 !important; }
.rc-card dt { color: var(--soft); font-weight: 400; }
.rc-card dd { margin: 0; }
.rc-tag { border-radius: 99px; padding: 0 .55rem; font-size: .85rem; font-weight: 600; border: 1px solid currentColor;
  white-space: nowrap; }
.rc-role { margin: 0 0 .8rem; } .rc-role p { margin: 0 0 .25rem; } .rc-role b { margin-right: .6rem; }
.rc-role p span { margin-right: .8rem; white-space: nowrap; }
.rc-chips { display: grid; grid-template-columns: repeat(auto-fill, minmax(12rem, 1fr)); gap: .4rem; }
.rc-chip { border: 1px solid var(--line); border-left: 4px solid; border-radius: 6px; padding: .25rem .6rem; }
.rc-chip b { color: var(--ink); margin: 0; } .rc-chip small { display: block; color: var(--soft); font-size: .85rem; }
.rc-map { display: flex; flex-wrap: wrap; gap: 3px 6px; margin: .3rem 0; }
.rc-node, .rc-ranks { display: inline-flex; flex-wrap: wrap; gap: 2px; }
.rc-map i, .rc-ranks i { width: 13px; height: 13px; border-radius: 3px; background: currentColor; display: block; }
.rc-map i:not([class]), .rc-ranks i:not([class]) { opacity: .55; }
.rc-map i[class], .rc-ranks i[class] { font: 700 11px/13px sans-serif; text-align: center; }
.rc-map i.rc-standby, .rc-map i.rc-ended { opacity: .8; }
.rc-map i[class]::before, .rc-ranks i[class]::before { content: attr(data-g); color: var(--card); }
.rc-ranks { margin-top: .2rem; color: light-dark(#00694f, #4fd1a5); }
.rc-bands { color: var(--soft); font-size: .9rem; margin: 0; } .rc-bands span { margin-right: 1rem; }
.rc-bands b { color: #d1495b; }
.rc-scroll { overflow-x: auto; }
.rc-table { border-collapse: collapse; } .rc-table.wide { width: 100%; } .rc-table td, .rc-table th { text-align: left;
  padding: .3rem 1.1rem .3rem 0; border: 0; border-bottom: 1px solid var(--line); font-weight: 400; vertical-align: top; }
.rc-table td.n { text-align: right; white-space: nowrap; } .rc-table th { color: var(--soft); font-size: .85rem; white-space: nowrap; }
.rc-table td.w { width: 1%; white-space: nowrap; color: var(--soft); }
.rc-mark { font-weight: 600; } .rc-table code { font-size: .85em; }
.rc-bar { display: inline-block; width: 5rem; height: .7rem; background: var(--line); border-radius: 3px; }
.rc-bar i { display: block; height: 100%; border-radius: 3px; background: currentColor; }
.rc-stacked > div { display: flex; height: 1.3rem; border-radius: 4px; overflow: hidden; background: var(--line); }
.rc-stacked p { margin: .35rem 0 0; } .rc-stacked p span { margin-right: 1.2rem; white-space: nowrap; }
.rc-stacked p i { display: inline-block; width: .8rem; height: .8rem; border-radius: 3px; }
.st-key-incidents-show, .rc-phone-cards, .rc-phone { display: none; }
.rc-phone-cards div { position: relative; border: 1px solid var(--line); border-radius: 6px; padding: .5rem .7rem;
  margin-bottom: .5rem; background: var(--card); }
.rc-phone-cards a { position: absolute; inset: 0; }
.rc-sparks { display: flex; gap: .75rem; flex-wrap: wrap; }
.rc-sparks figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; padding: .5rem .75rem; min-width: min(24rem, 100%); }
.rc-sparks figcaption, .rc-sparks small { color: var(--soft); font-size: .85rem; } .rc-sparks b { font-size: 1.45rem; }
.rc-sparks div { display: flex; align-items: flex-end; gap: 2px; height: 2.6rem; margin-top: .3rem; }
.rc-sparks div i { flex: 1; min-height: 2px; max-width: 1.2rem; background: #3b7dd8; border-radius: 1px; }
.rc-sparks div span { color: var(--soft); font-size: .75rem; line-height: 1.3rem; padding-right: .4rem; }
.rc-phone-cards i { font-style: normal; font-weight: 600; }
.rc-phone-cards span, .rc-phone-cards small { display: block; color: var(--soft); font-size: .85rem; }
[role="dialog"] > h2 + div > div:not(:has(input, button)) { font-size: 0; } [role="dialog"] > h2 + div pre { display: none; }
[role="dialog"] > h2 + div > div:not(:has(input, button))::after { font-size: 1rem; white-space: pre-line; content:
  "SERVER_LOST"; }
[data-stale="true"] { opacity: 1 !important; transition: none !important; }
@media (max-width: 640px) { [data-testid="stMainBlockContainer"] { padding: 4.6rem 1rem 3rem; }
  .rc-phone-cards, .rc-phone { display: block; }
  .st-key-incidents-table, .st-key-incidents-keys, .st-key-fleet-table { display: none; }
  .rc-events tbody tr:nth-child(n+6) { display: none; }
  .rc-card dl { grid-template-columns: 5.6rem 1fr; column-gap: .5rem; } .rc-card dt { overflow-wrap: normal; }
  .rc-chips { grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); }
  .rc-figures { grid-template-columns: repeat(2, 1fr); gap: .5rem; } .rc-table td, .rc-table th { padding-right: .6rem; }
  .rc-map i { width: 10px; height: 10px; }
  .rc-table.stack thead { display: none; } .rc-table.stack td { display: flex; border: 0; padding: 0; text-align: left; }
  .rc-table.stack td:empty { display: none; }
  .rc-table.stack td::before { content: attr(data-h); flex: none; width: 6.5rem; color: var(--soft); }
  .rc-table.stack tr { display: block; border-bottom: 1px solid var(--line); padding: .3rem 0; }
  .st-key-incidents-show { display: flex; } .st-key-incidents-filters { display: none; }
  [data-testid="stVerticalBlock"]:has(> .st-key-incidents-show input:checked) > div > .st-key-incidents-filters,
  [data-testid="stVerticalBlock"]:has(.st-key-incidents-show input:checked) .st-key-incidents-filters { display: flex; } }
@media (prefers-reduced-motion: reduce) { * { animation: none !important; transition: none !important; } }
"""


@cache
def css() -> str:
    rules = [_CSS.replace("SERVER_LOST", SERVER_LOST)]
    for name, (_, light, dark) in STATES.items():
        rules.append(f".rc-{class_of(name)} {{ color: light-dark({light}, {dark}); }}")
    for kind, (light, dark, ground, dark_ground) in _KINDS.items():
        colours = f"color: light-dark({light}, {dark}); background: light-dark({ground}, {dark_ground});"
        rules.append(f".rc-banner.{kind} {{ {colours} }}")
        rules.append(f".rc-{kind}, .rc-tag.{kind}, .rc-state.{kind} {{ color: light-dark({light}, {dark}); }}")
        rules.append(f".rc-state.{kind}, .rc-card.{kind} {{ border-color: light-dark({light}, {dark}); }}")
        rules.append(f'[class*="st-key-card-{kind}"] {{ border-left-color: light-dark({light}, {dark}); }}')
    return "<style>" + "\n".join(rules) + "</style>"


def class_of(state: str) -> str:
    return state.replace(" ", "-")


def banner(kind: str, head: str, *sentences: str, advice: str = "") -> str:
    """A banner: headline, details, and advice. `kind`: bad, warn, note or good.

    Only `advice` renders backticks as code.
    """
    parts = "".join(f"<p>{escape(s, 600)}</p>" for s in sentences if s)
    parts += f"<p>{_code(escape(advice, 600))}</p>" if advice else ""
    role = "alert" if kind == "bad" else "status"
    return f'<div class="rc rc-banner {kind}" role="{role}"><b>{ICONS[kind]} {escape(head, 300)}</b>{parts}</div>'


def _code(text: str) -> str:
    """Renders backticks as code. `text` is already escaped, so these are its only tags."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return text
    return "".join(f"<code>{p}</code>" if n % 2 else p for n, p in enumerate(parts))


def figures(rows: list[tuple[str, str, str]]) -> str:
    """Key figures: label, value, note."""
    parts = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd><dd>{escape(more)}</dd></div>"
        for what, value, more in rows
    )
    return f'<dl class="rc rc-figures">{parts}</dl>'


@dataclass(frozen=True, slots=True)
class Link:
    text: str
    url: str  # within the dashboard

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Mark:
    """A state in its colour, with a glyph. `kind`: bad, warn, note, good or soft."""

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Bar:
    """A number with a bar, to be compared with those below it. `share`: of the longest, 0 to 1."""

    share: float
    text: str
    kind: str = "good"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Prose:
    """A text whose backticks are shown as code."""

    text: str

    def __str__(self) -> str:
        return self.text


Cell = str | Link | Mark | Bar | Prose


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Of a stacked bar. `share`: 0 to 1."""

    share: float
    name: str
    text: str
    colour: str


def stacked(segments: Sequence[Segment]) -> str:
    """A stacked bar as wide as its place, with a legend; shares too small to be seen are in the legend only."""
    bar = "".join(
        f'<i title="{escape(f"{s.name}: {s.text}", 200)}" style="width:{100 * s.share:.2f}%;background:{s.colour}"></i>'
        for s in segments
    )
    legend = "".join(
        f'<span><i style="background:{s.colour}"></i> <b>{escape(s.name, 60)}</b> {escape(s.text, 80)}</span>'
        for s in segments
    )
    return f'<div class="rc rc-stacked"><div>{bar}</div><p>{legend}</p></div>'


_NUMBER = re.compile(r"(< )?\d[\d.,]*( (\d+|s|min|h|d|%))*")


def _cell_html(content: Cell) -> str:
    text = escape(content)
    if isinstance(content, Mark):
        glyph = GLYPHS.get(content.kind, "·")
        return f'<span class="rc-{escape(content.kind)} rc-mark">{glyph} {text}</span>'
    if isinstance(content, Prose):
        return _code(text)
    if isinstance(content, Bar):
        width = 100 * max(0.0, min(1.0, content.share))
        return (
            f'<span class="rc-bar"><i class="rc-{escape(content.kind)}" style="width:{width:.0f}%"></i></span> {text}'
        )
    return f'<a href="{escape(content.url)}" target="_self">{text}</a>' if isinstance(content, Link) else text


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]], narrow: int = 0, *, stack: bool = False) -> str:
    """A small table, which scrolls where the page is narrower; numbers are right-aligned. The first `narrow` columns
    never wrap, and the rest fills the page. `stack`: on a phone the cells of a row stand below each other, with
    their headings."""
    heads = "".join(f"<th scope=col>{escape(h)}</th>" for h in head)
    heads_of_cells = [f' data-h="{escape(h)}"' if stack else "" for h in head]
    lines = []
    for row in rows:
        kinds = ["w" if n < narrow else "n" if _NUMBER.fullmatch(str(c)) else "" for n, c in enumerate(row)]
        cells = zip(heads_of_cells, kinds, row, strict=True)
        lines.append(
            "<tr>" + "".join(f"<td{h}{f' class={k}' if k else ''}>{_cell_html(c)}</td>" for h, k, c in cells) + "</tr>"
        )
    wide = (" wide" if narrow else "") + (" stack" if stack else "")
    inside = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="rc-scroll"><table class="rc rc-table{wide}">{inside}</table></div>'


def state_line(kind: str, word: str, details: Sequence[str]) -> str:
    """The state of the run in one line. `kind`: as of `banner`."""
    rest = "".join(f"<span>{escape(d, 300)}</span>" for d in details if d)
    return f'<p class="rc rc-state {kind}" role="status"><b>{GLYPHS[kind]} {escape(word, 100)}</b>{rest}</p>'


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Label and text, a line each; those without a text are left out."""
    return "".join(f"<dt>{escape(what)}</dt><dd>{escape(text)}</dd>" for what, text in rows if text)


def card(
    kind: str, glyph: str, title: str, tags: Sequence[str], soft: str, because: str, rows: Sequence[tuple[str, str]]
) -> str:
    """An incident: title, tags, a soft note, the reason, and facts. `kind`: as of `banner`."""
    tagged = "".join(f'<span class="rc-tag {kind}">{escape(t, 60)}</span>' for t in tags)
    return (
        '<article class="rc rc-card"><header><div class="title" role="heading" aria-level="4">'
        f'<i class="rc-{kind}">{escape(glyph)}</i> {escape(title, 300)}</div>{tagged}<span class="rc-soft">'
        f"{escape(soft, 200)}</span></header><p>{escape(because)}</p><dl>{facts(rows)}</dl></article>"
    )


def sparkline(label: str, values: Sequence[float]) -> str:
    """Durations as bars from 0 to the largest, which is named, with their median."""
    top = max(values) or 1.0
    bars = "".join(f'<i style="height:{100 * v / top:.0f}%" title="{seconds(v)}"></i>' for v in values)
    said = f"median {seconds(statistics.median(values))}, from {seconds(min(values))} to {seconds(max(values))}"
    return (
        f"<figure><figcaption>{escape(label)}</figcaption><b>{seconds(statistics.median(values))}</b> <small>median; "
        f'{seconds(min(values))} to {seconds(max(values))}</small><div role="img" aria-label="{said}"><span>'
        f"{seconds(top)}<br>0</span>{bars}</div></figure>"
    )


def cell(state: str, name: str) -> str:
    """A replica or rank in a map. A usual one is a plain square; any other has its glyph and its name."""
    if state == "healthy":
        return "<i></i>"
    return f'<i class="rc-{class_of(state)}" data-g="{STATES[state][0]}" title="{escape(f"{name}: {state}", 200)}"></i>'


def band_legend(bands: Sequence[tuple[str, str]], num_all: int) -> str:
    """The letters of the fault bands in the charts above. `num_all`: faults of the run, of which these are the newest."""
    parts = "".join(f"<span><b>{escape(key)}</b> {escape(what, 200)}</span>" for key, what in bands)
    head = "Faults" if num_all <= len(bands) else f"Faults, the last {len(bands)} of {num_all:,}"
    return f'<p class="rc rc-bands">{head}: {parts}</p>'
