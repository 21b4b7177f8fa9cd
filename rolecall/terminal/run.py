"""Shows a run on the terminal: live, as lines without a terminal, and as the final summary. Pure, but for `Screen`.

External text goes through `plain` into `Text`, never into markup: a replica named `[red]` is shown as `[red]`, and no
escape sequence reaches the terminal. The live view fits into 80 x 24.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rolecall.core.ids import role_of
from rolecall.core.journal.journal import Journal
from rolecall.core.text import in_words, plain, seconds
from rolecall.recovery.projection import IncidentProjection
from rolecall.reports.charts import ROLE_ORDER, key_of
from rolecall.reports.html import evaluation_sentence, headline
from rolecall.views.journal_reader import JournalReader
from rolecall.views.snapshot import LENT, IncidentRow, ReplicaRow, RunSnapshot, RunSnapshotProjection

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 30.0
"""Between two lines of progress where nothing else happens, without a terminal."""
CHART_ROWS = 4
CHART_LABEL = 6  # columns left of the reward curve
REPLICAS_SHOWN = 6
"""Per role and line; of more, only those that do not serve are shown."""
OPEN_SHOWN = 3
SENTENCE_LINES = 3
"""Of an open incident's text; the rest is cut."""
RAGGED = 4
"""Columns that a long word may leave empty, plus the indent."""
_STYLE = {
    "serving": "green",
    "ready": "cyan",
    "starting": "yellow",
    "wanted": "yellow",
    "lent": "yellow",
    "lost": "bold red",
}
_SIGN = {"serving": "●", "ready": "○", "starting": "◔", "wanted": "◌", "lent": "⇄", "lost": "✕", "stopped": "·"}


def render(snapshot: RunSnapshot, title: str = "", width: int = 80) -> RenderableType:
    """The whole live view, `width` columns wide."""
    parts: list[RenderableType] = [_head(snapshot, title), Text()]
    parts += _roles(snapshot.replicas)
    parts += [Text(), _progress(snapshot), *_reward(snapshot.rewards, width), *_health(snapshot.signs), Text()]
    parts += _incidents(snapshot, width)
    return Group(*parts)


def _line(*pieces: tuple[str, str]) -> Text:
    """One line, cut with an ellipsis."""
    return Text.assemble(*((plain(text), style) for text, style in pieces), no_wrap=True, overflow="ellipsis")


def _head(snapshot: RunSnapshot, title: str) -> Text:
    state = (
        ("paused: " + snapshot.paused, "bold yellow")
        if snapshot.paused
        else (snapshot.ended or "running", "bold" if snapshot.ended else "green")
    )
    age = "" if snapshot.started_at is None else f"  {seconds(snapshot.elapsed_seconds)}"
    mode = "" if snapshot.mode == "async" else f"  mode {snapshot.mode}"
    return _line((title or "rolecall", "bold"), ("  ", ""), state, (age, "dim"), (mode, "dim"))


def _roles(rows: Sequence[ReplicaRow]) -> list[Text]:
    roles: dict[str, list[ReplicaRow]] = {}
    for row in rows:
        roles.setdefault(role_of(row.replica), []).append(row)
    known = {role: n for n, role in enumerate(ROLE_ORDER)}
    lines = []
    for role in sorted(roles, key=lambda r: (known.get(r, len(known)), r)):
        its = roles[role]
        pieces = [(f"{role:<11.11}", "bold"), (f"{sum(r.serves for r in its)}/{len(its)}  ", "dim")]
        shown = its if len(its) <= REPLICAS_SHOWN else [r for r in its if not r.serves][:REPLICAS_SHOWN]
        for row in shown:
            pieces += _chip(row)
        lines.append(_line(*pieces))
    return lines


def _chip(row: ReplicaRow) -> list[tuple[str, str]]:
    index = row.replica.partition("/")[2]
    again = f"#{row.incarnation}" if row.incarnation > 1 else ""
    state = "" if row.serves else f" {row.state}"
    style = "green" if row.serves else _STYLE.get(row.state, "dim")
    return [(f"{_SIGN.get(row.state, '?')} ", style), (f"{index}{again}{state}   ", "" if row.serves else style)]


def _progress(snapshot: RunSnapshot) -> Text:
    if snapshot.step < 0:
        return _line((snapshot.note or "starting", "dim"))
    # It goes on beyond them while an incident is open.
    of = f"/{n}" if (n := snapshot.num_steps) and snapshot.step < n else ""
    reward = f"{snapshot.rewards[-1]:.2f}" if snapshot.rewards else "-"
    rate = f"{snapshot.tokens_per_second:,.0f}" if snapshot.tokens_per_second is not None else "-"
    pace = f"{snapshot.step_seconds:.2f}" if snapshot.step_seconds is not None else "-"
    held_out = snapshot.held_out_reward
    evaluated = [] if held_out is None else [("   held out ", "dim"), (f"{held_out:.2f}", "bold")]
    return _line(
        ("step ", "dim"), (f"{snapshot.step + 1}{of}", "bold"), ("   reward ", "dim"), (reward, "bold"), *evaluated,
        ("   tokens/s ", "dim"), (rate, "bold"), ("   s/step ", "dim"), (pace, "bold"),
        ("   membership ", "dim"), (str(snapshot.epoch), "bold"),
    )  # fmt: skip


def _reward(rewards: Sequence[float], width: int) -> list[Text]:
    columns = max(10, width - CHART_LABEL - 2)
    low, high = min([0.0, *rewards]), max([1.0, *rewards])
    rows = braille(rewards, columns, CHART_ROWS, low, high)
    labels = {0: f"{high:.1f}", CHART_ROWS - 1: f"{low:.1f}"}
    return [_line((f"{labels.get(n, ''):>{CHART_LABEL - 1}} ", "dim"), (row, "blue")) for n, row in enumerate(rows)]


def _health(signs: Mapping[str, float]) -> list[Text]:
    """Policy health of the newest step, in one line; none if it reported nothing."""
    labels = [(f"{name} ", form.format(signs[sign])) for sign, name, form in _SIGNS if sign in signs]
    pieces = [((name if n == 0 else "   " + name, "dim"), (value, "")) for n, (name, value) in enumerate(labels)]
    return [_line(*(piece for pair in pieces for piece in pair))] if labels else []


_SIGNS = (
    ("entropy", "entropy", "{:.2f}"),
    ("response_length", "tokens an answer", "{:.1f}"),
    ("truncated_fraction", "cut off", "{:.0%}"),
    ("filtered_fraction", "filtered", "{:.0%}"),
    ("kl_sampler", "KL", "{:.2g}"),
)
"""Field of core/policy_health.py, its short label, and its format."""

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille cell's dots: left and right column, top to bottom."""


def braille(values: Sequence[float], columns: int, rows: int, low: float, high: float) -> list[str]:
    """A curve in braille dots, two per column and four per row; more values than dots are averaged."""
    cells = [[0] * columns for _ in range(rows)]
    dots = columns * 2
    num = min(len(values), dots)
    before: int | None = None
    for column in range(num):
        chunk = values[column * len(values) // num : (column + 1) * len(values) // num]
        share = (sum(chunk) / len(chunk) - low) / (high - low)
        tall = rows * 4 - 1
        y = tall - round(min(1.0, max(0.0, share)) * tall)
        # Fill between neighbours, so that a jump stays one line.
        start = y if before is None else before + (1 if y > before else -1 if y < before else 0)
        for dot in range(min(start, y), max(start, y) + 1):
            cells[dot // 4][column // 2] |= _DOTS[column % 2][dot % 4]
        before = y
    return ["".join(chr(0x2800 + bits) for bits in row) for row in cells]


def _incidents(snapshot: RunSnapshot, width: int) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for number, incident in enumerate(reversed(snapshot.open_incidents[-OPEN_SHOWN:])):
        what, who = (f"▲ {incident.fault_class}", "bold red"), (f"  {_who(incident)}  ", "bold")
        parts.append(_line(what, who, (f"{incident.stage}, {incident.durations.end_words}", "yellow")))
        if number == 0:  # the newest in full, the others by name
            sentence = plain(incident.because, SENTENCE_LINES * max(10, width - RAGGED))
            parts.append(Padding(Text(sentence), (0, 0, 0, 2)))
            if detail := _beyond_diagnosis(incident):
                parts.append(_line(("  " + detail, "dim")))
    if not snapshot.open_incidents:
        parts.append(_line(("no open incidents", "dim")))
    closed = snapshot.closed_incidents[-1:] if snapshot.open_incidents else snapshot.closed_incidents
    for incident in reversed(closed):
        sign, style = ("✓", "green") if incident.stage == "resolved" else ("✕", "yellow")
        about = f"{incident.fault_class}, {incident.durations.end_words}: {incident.because}"
        parts.append(_line((f"{sign} {incident.stage} ", style), (f"{_who(incident)} ", ""), (about, "dim")))
    return parts


def _who(incident: IncidentRow) -> str:
    return ", ".join(incident.suspects) or "no suspect"


def _beyond_diagnosis(incident: IncidentRow) -> str:
    """What the newest text adds to the diagnosis, which a plan often gives as its reason, or begins with."""
    return incident.detail.removeprefix(incident.because).removeprefix("; ")


def plain_lines(before: RunSnapshot | None, now: RunSnapshot, *, progress_due: bool = True) -> list[str]:
    """Lines since the previous snapshot: changes, then one line of progress if it is due or something changed. No
    colour, no control character."""
    at = f"{now.elapsed_seconds:7.1f} s  "
    lines = []
    states = {r.replica: (r.incarnation, r.state) for r in before.replicas} if before else {}
    for row in now.replicas:
        if before and states.get(row.replica) != (row.incarnation, row.state):
            where = f" on {row.node}" if row.node else ""
            state = "lent its node" if row.state == LENT else row.state
            lines.append(f"{at}{row.replica}#{row.incarnation}{where}: {state}")
    known = {i.incident_id: i for i in (*before.open_incidents, *before.closed_incidents)} if before else {}
    for incident in (*now.open_incidents, *now.closed_incidents):
        old = known.get(incident.incident_id)
        if old is None:
            lines.append(f"{at}INCIDENT {incident.incident_id} {incident.fault_class}: {incident.because}")
        if old is None or old.stage != incident.stage:
            more = f". {detail}" if (detail := _beyond_diagnosis(incident)) else ""
            lines.append(f"{at}incident {incident.incident_id} {_who(incident)}: {incident.stage}{more}")
    if now.paused and (before is None or before.paused != now.paused):
        lines.append(f"{at}paused: {now.paused}")
    evaluated = before is not None and before.held_out_reward != now.held_out_reward
    is_noted = before is None and now.step < 0  # what is being waited for stands in the line before
    if lines or evaluated or (progress_due and not is_noted):
        lines.append(at + _progress(now).plain)
    return [plain(line, 500).rstrip() for line in lines]


def summary(report: Mapping[str, Any]) -> RenderableType:
    """The report in one screen."""
    style = "bold green" if report["ok"] else "bold red"
    pace = report["seconds_to_n_steps"]
    beside = pace["baseline"] if pace["baseline"] is not None else pace["estimate"]
    how = (
        f"failure-free run {plain(pace['baseline_run'])}"
        if pace["baseline"] is not None
        else "estimated failure-free pace"
    )
    parts: list[RenderableType] = [Text(), _line((headline(report), style)), _line((report["learns"], "dim"))]
    if sentence := evaluation_sentence(report):
        parts.append(_line((sentence, "")))
    parts.append(Text())
    if report["incidents"] or report["missed"]:
        parts += [_table(report), _line(("found: since the fault; verified: since the finding", "dim")), Text()]
    parts.append(
        _line((f"{pace['n']} steps in {seconds(pace['this'])}", "bold"), (f"  ({how}: {seconds(beside)})", "dim"))
    )
    ratio = "-" if report["ettr"] is None else f"{100 * report['ettr']:.1f} %"
    parts.append(_line(("ETTR ", "dim"), (ratio, "bold"), ("  weights proven ", "dim"), (str(report["weights_proven"]), "bold"),  # noqa: E501
                       ("  processes kept ", "dim"), (str(report["pids"]["num_kept"]), "bold")))  # fmt: skip
    lost = report["lost_replica_seconds"]
    if lost:
        spent = ", ".join(f"{where} {'–' if amount is None else f'{amount:,.1f}'}" for where, amount in lost.items())
        parts.append(Text.assemble(("lost, replica-seconds: ", "dim"), spent))
    for row in report["verdict"]:
        sign = ("✓ ", "green") if row["ok"] else ("✕ ", "bold red")
        parts.append(_line(sign, (f"{row['what']}: {row['because']}", "")))
    parts += [_line(("  " + problem, "red")) for problem in report["audit"]["problems"][:10]]
    if report.get("html"):
        # Not cut: it is copied from the terminal.
        parts += [Text(), Text.assemble(("report  ", "dim"), plain(report["html"]), overflow="fold")]
    return Group(*parts)


def _table(report: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("", "fault", "target", "named", "found", "verified", "lost"):
        table.add_column(name, justify="right" if name in ("found", "verified") else "left", overflow="ellipsis")
    for number, incident in enumerate(report["incidents"]):
        fault = incident["fault"]
        kind, target = (
            (fault["kind"], fault["target"]) if fault else (in_words(incident["fault_class"]), "not injected")
        )
        took = incident["verified_seconds"]
        verified = seconds(took) if took is not None else in_words(incident["outcome"])
        cells = (
            kind,
            target,
            ", ".join(incident["suspects"]),
            seconds(incident["detected_seconds"]),
            verified,
            f"{incident['tokens_lost']} tokens",
        )
        table.add_row(key_of(number), *(Text(plain(c)) for c in cells))
    for number, fault in enumerate(report["missed"], start=len(report["incidents"])):
        table.add_row(
            key_of(number), Text(plain(fault["kind"])), Text(plain(fault["target"])), Text("missed", style="red")
        )
    return table


class Screen:
    """Shows one run, redrawn in place (`live`) or as lines. A context manager."""

    def __init__(
        self,
        *,
        live: bool,
        title: str,
        num_steps: int | None = None,
        shell_name: str = "",
        console: Console | None = None,
    ) -> None:
        self._console = console or Console(highlight=False, markup=False)
        self._title = title
        self._projection, self._incidents = (
            RunSnapshotProjection(num_steps=num_steps, shell_name=shell_name),
            IncidentProjection(),
        )
        self._reader = JournalReader()
        self._before: RunSnapshot | None = None
        self._progress_at = float("-inf")
        self._note = ""
        self._printed: list[str] = []
        self._size = self._console.size
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="ellipsis") if live else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        else:
            self._print(self._title)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """Status text while there is nothing to draw yet."""
        self._note = text
        if self._live is None:
            self._print(text)
        elif self._before is None:
            self._draw(RunSnapshot(now=0.0, note=text))

    def add_line(self, text: str) -> None:
        """Prints a line that stays above the display."""
        self._printed.append(text)
        self._print(text)

    def draw(self, journal: Journal, now: float, *, last: bool = False) -> None:
        """Reads and shows new events. `now`: monotonic seconds; the display uses wall time. `last`: the run is over."""
        try:
            projection = self._projection
            for page in self._reader.pages(journal):
                projection.read(page.events)
                self._incidents.take(page.events, page.damaged)
            snapshot = projection.snapshot(
                journal.clock.wall(),
                journal.desired(),
                journal.current(),
                journal.flag("paused"),
                self._note,
                self._incidents.incidents.values(),
            )
            if self._live is not None:
                self._draw(snapshot)
            else:
                lines = plain_lines(
                    self._before, snapshot, progress_due=last or now - self._progress_at >= PROGRESS_SECONDS
                )
                if lines:
                    self._progress_at = now
                for line in lines:
                    self._print(line)
            self._before = snapshot
        except Exception:
            # Deliberate: a failing display must not stop the run; it is drawn again next time.
            logger.exception("cannot draw at %.1f", now)

    def _draw(self, snapshot: RunSnapshot) -> None:
        assert self._live is not None
        if self._console.size != self._size:
            # The terminal moved or wrapped the lines drawn last, so their position is unknown.
            self._size = self._console.size
            self._console.clear()
            for text in self._printed:
                self._print(text)
        self._live.update(render(snapshot, self._title, self._console.width), refresh=True)

    def _print(self, text: str) -> None:
        self._console.print(plain(text, 500), markup=False, highlight=False, soft_wrap=True)
