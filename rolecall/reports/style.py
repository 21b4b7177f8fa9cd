"""The look of HTML reports: colours for light and dark, one scale of type, nothing loaded from elsewhere.

State colours differ in lightness as well as in hue and never stand alone: a word, a letter or a shape goes with each.
"""

from rolecall.core.text import escape

CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #16202c; --soft: #55616f; --line: #dde2e8; --faint: #eef1f4;
  --accent: #2f5fb3; --lane: #9fb0c6; --lane-new: #3f74cf; --starting: #d5dce6;
  --good: #14744b; --good-bg: #e3f4ec; --bad: #b3261e; --bad-bg: #fbe7e5; --warn: #d98a00; --band: #b3261e14;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f141a; --card: #171e26; --ink: #e6ebf1; --soft: #9aa7b5; --line: #2a343f; --faint: #1e2730;
    --accent: #86aef2; --lane: #4b5b70; --lane-new: #5d8de0; --starting: #2c3744;
    --good: #5fd19d; --good-bg: #14301f; --bad: #ff8a80; --bad-bg: #3a1917; --warn: #f0b040; --band: #ff8a8012;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 40px 24px 64px; }
header p { margin: 0; }
.eyebrow { color: var(--soft); font-size: 13px; letter-spacing: .04em; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -.01em; margin: 4px 0 6px; font-weight: 650; text-wrap: balance; }
h2 { font-size: 18px; line-height: 1.3; margin: 40px 0 4px; font-weight: 650; }
h3 { font-size: 15px; margin: 0; font-weight: 650; }
h2 + .lead { margin: 0 0 14px; }
.lead, .muted { color: var(--soft); }
.small { font-size: 13px; }
code, .mono { font: 13px/1.45 ui-monospace, "SF Mono", "Cascadia Mono", "DejaVu Sans Mono", Menlo, monospace; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; }
.verdict { display: flex; flex-wrap: wrap; padding: 0; margin: 20px 0 0; overflow: hidden; }
.verdict div { flex: 1 1 190px; padding: 12px 16px; box-shadow: -1px -1px 0 var(--line); }
.verdict b { display: block; font-size: 13px; font-weight: 600; }
.verdict span { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.good { color: var(--good); } .bad { color: var(--bad); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; margin: 12px 0 0; padding: 0; }
.figures div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.figures dt { color: var(--soft); font-size: 13px; }
.figures dd { margin: 2px 0 0; font-size: 23px; line-height: 1.25; font-weight: 620; letter-spacing: -.01em;
  font-variant-numeric: tabular-nums; }
.figures dd + dd { font-size: 13px; font-weight: 400; color: var(--soft); letter-spacing: 0; }
.scroll { overflow-x: auto; }
.chart { padding: 14px 16px 8px; }
.chart svg { display: block; width: 100%; min-width: 760px; height: auto; }
.chart + .chart { margin-top: 10px; }
.chart h3 { margin: 0 0 2px; }
svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
  font-variant-numeric: tabular-nums; }
svg .bar { fill: var(--lane); } svg .bar-new { fill: var(--lane-new); } svg .bar-starting { fill: var(--starting); }
svg .bar-standby { fill: none; stroke: var(--lane); stroke-width: 1.25; }
svg .undetected { fill: var(--bad); } svg .recovering { fill: var(--warn); } svg .resolved { fill: var(--good); }
.legend { display: flex; flex-wrap: wrap; gap: 6px 20px; margin: 10px 0 4px; padding: 0; list-style: none;
  color: var(--soft); font-size: 13px; }
.legend svg { display: inline-block; width: 22px; min-width: 0; height: 12px; margin-right: 6px; vertical-align: -1px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; font-size: 13px; color: var(--soft); }
th, td { padding: 8px 14px 8px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td:first-child { white-space: nowrap; }
th.n, td.n { text-align: right; white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
.key { display: inline-grid; place-items: center; width: 20px; height: 20px; border-radius: 50%; background: var(--bad);
  color: var(--card); font-size: 12px; font-weight: 700; margin-right: 8px; flex: none; }
.key.none { background: var(--soft); }
.incident { margin-top: 12px; }
.incident > header { display: flex; align-items: center; flex-wrap: wrap; row-gap: 4px; }
.tag { margin-left: auto; padding: 1px 10px; border-radius: 999px; font-size: 13px; font-weight: 600; }
.tag.good { background: var(--good-bg); } .tag.bad { background: var(--bad-bg); }
.because { font-size: 17px; line-height: 1.45; margin: 12px 0 14px; max-width: 78ch; overflow-wrap: anywhere; }
.steps { display: grid; grid-template-columns: max-content 1fr; gap: 5px 18px; margin: 0; }
.steps dt { color: var(--soft); } .steps dd { margin: 0; overflow-wrap: anywhere; max-width: 90ch; }
details { margin-top: 10px; } summary { cursor: pointer; color: var(--accent); font-size: 14px; }
details ul { margin: 8px 0 0; padding-left: 20px; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 12px; align-items: start; }
.hash { overflow-wrap: anywhere; }
pre { margin: 10px 0 0; padding: 14px; background: var(--faint); border-radius: 8px; overflow-x: auto; }
footer { margin-top: 48px; color: var(--soft); font-size: 13px; }
@media print { body { background: none; } .card, .figures div { break-inside: avoid; } }
"""


def document(title: str, body: str, more_css: str = "") -> str:
    """A page without scripts that loads nothing. `body`: HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>rolecall: {escape(title)}</title><style>{CSS}{more_css}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )
