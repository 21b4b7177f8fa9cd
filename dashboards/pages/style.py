"""CSS and small HTML elements for which Streamlit has no component. Pure.

Colours are `light-dark()` pairs with a contrast of at least 4.5:1 against the page, so they follow the active theme. A
state has a glyph, a name and a colour; colour is never the only cue. All text goes through `text.escape`.
"""

from functools import cache

from rolecall.core.text import escape

STATES = {
    "lost": ("✕", "#b3261e", "#ff8a80"),
    "suspect": ("▲", "#a34700", "#ffb066"),
    "being replaced": ("↻", "#1a56c4", "#8ab4ff"),
    "quarantined": ("⊘", "#8a2f8a", "#e3a1e3"),
    "starting": ("◔", "#7a5b00", "#e5c34d"),
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

_CSS = """
.rc { font-variant-numeric: tabular-nums; line-height: 1.45; overflow-wrap: anywhere; }
.rc-soft { color: light-dark(#55616f, #a3afbb); }
.rc-banner { border-left: 4px solid; border-radius: 6px; padding: .55rem .8rem; margin: 0 0 .25rem; }
.rc-banner b { margin-right: .4rem; } .rc-banner p { margin: .15rem 0 0; color: light-dark(#16202c, #e6ebf1); }
.rc-figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.2rem, 1fr)); gap: .4rem 1rem;
  margin: .2rem 0 !important; padding: 0 !important; }
[data-testid="stMainBlockContainer"] { padding-top: 3.5rem; }
.rc-figures div { border-top: 1px solid light-dark(#dde2e8, #37424e); padding-top: .35rem; }
.rc-figures dt { font-size: .82rem; color: light-dark(#55616f, #a3afbb); }
.rc-figures dd { margin: 0; font-size: 1.35rem; font-weight: 620; line-height: 1.25; }
.rc-figures dd + dd { font-size: .82rem; font-weight: 400; color: light-dark(#55616f, #a3afbb); }
.rc-incident { border: 1px solid light-dark(#dde2e8, #37424e); border-left: 4px solid light-dark(#b3261e, #ff8a80);
  border-radius: 8px; padding: .7rem .9rem; margin: 0; }
.rc-incident header { display: flex; flex-wrap: wrap; gap: .2rem .7rem; align-items: baseline; }
.rc-incident .because { font-size: 1.08rem; margin: .35rem 0 .45rem; max-width: 85ch; }
.rc-incident dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .9rem; margin: 0 !important;
  padding: 0 !important; }
.rc-incident dt { color: light-dark(#55616f, #a3afbb); } .rc-incident dd { margin: 0; max-width: 90ch; }
.rc-tag { border-radius: 99px; padding: 0 .55rem; font-size: .85rem; font-weight: 600; border: 1px solid currentColor; }
.rc-role { margin: 0 0 .15rem; } .rc-role b { margin-right: .5rem; }
.rc-chips { display: grid; grid-template-columns: repeat(auto-fill, minmax(11.5rem, 1fr)); gap: .3rem .5rem; margin: .25rem 0; }
.rc-chip { border: 1px solid light-dark(#dde2e8, #37424e); border-radius: 6px; padding: .2rem .5rem; font-size: .88rem; }
.rc-chip small { display: block; color: light-dark(#55616f, #a3afbb); font-size: .78rem; }
.rc-map { font: 13px/1.25 ui-monospace, "DejaVu Sans Mono", monospace; display: grid; grid-template-columns: max-content 1fr;
  gap: 0 .7rem; margin: .2rem 0; } .rc-map i { font-style: normal; text-align: right; color: light-dark(#55616f, #a3afbb); }
.rc-map span.row { letter-spacing: .12em; overflow-wrap: anywhere; }
.rc-table { border-collapse: collapse; } .rc-table td, .rc-table th { text-align: left; padding: .12rem 1.1rem .12rem 0;
  border-bottom: 1px solid light-dark(#e6eaee, #2e3843); font-weight: 400; } .rc-table td.n { text-align: right; }
.rc-table th { color: light-dark(#55616f, #a3afbb); font-size: .82rem; }
@media (max-width: 640px) { .rc-map { font-size: 9px; line-height: 1.5; } .rc-map span.row { letter-spacing: 0; } .rc-chips { grid-template-columns: repeat(auto-fill, minmax(9.2rem, 1fr)); }
  .rc-incident dl { grid-template-columns: 1fr; } .rc-incident dd { margin-bottom: .3rem; }
  .rc-figures { grid-template-columns: repeat(auto-fit, minmax(6.6rem, 1fr)); }
  [data-testid="stMainBlockContainer"] { padding: 3.5rem 1rem 3rem; } }
[data-stale="true"] { opacity: 1 !important; transition: none !important; }
@media (prefers-reduced-motion: reduce) { * { animation: none !important; transition: none !important; } }
"""


@cache
def css() -> str:
    rules = [_CSS]
    for name, (_, light, dark) in STATES.items():
        rules.append(f".rc-{class_of(name)} {{ color: light-dark({light}, {dark}); }}")
    for kind, (light, dark, ground, dark_ground) in _KINDS.items():
        colours = f"color: light-dark({light}, {dark}); background: light-dark({ground}, {dark_ground});"
        rules.append(f".rc-banner.{kind} {{ {colours} }}")
        rules.append(f".rc-tag.{kind} {{ color: light-dark({light}, {dark}); }}")
    return "<style>" + "\n".join(rules) + "</style>"


def class_of(state: str) -> str:
    return state.replace(" ", "-")


def banner(kind: str, head: str, *sentences: str, advice: str = "") -> str:
    """A banner: headline, details, and advice. `kind`: bad, warn, note or good.

    Only `advice`, which is trusted text, renders backticks as code.
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


def table(head: list[str], rows: list[list[str]]) -> str:
    """A small table; numbers are right-aligned."""
    heads = "".join(f"<th scope=col>{escape(h)}</th>" for h in head)
    lines = "".join(
        "<tr>" + "".join(f"<td{' class=n' if c[:1].isdigit() else ''}>{escape(c)}</td>" for c in row) + "</tr>"
        for row in rows
    )
    return f'<table class="rc rc-table"><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>'
