"""Looks at a dashboard as Grafana does: asks for the values of its variables, puts them into its expressions, runs
these.

`look` says what was asked and what came back: for each expression of each panel the number of points, and for each
metric in it the same alone, so that nothing hides behind an `or`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rolecall.dashboards.grafana.promql import selectors
from tests.dashboards.prometheus_of_demo import DemoPrometheus

RATE_INTERVAL_SECONDS = 60
POINTS = 60
"""Of a range query: as many as a narrow panel has pixels for."""
_LABEL_VALUES = re.compile(r"label_values\((.+),\s*(\w+)\)", re.DOTALL)
_QUERY_RESULT = re.compile(r"query_result\((.+)\)", re.DOTALL)
_VARIABLE = re.compile(r"\$(\w+)")


def all_panels(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All panels of a document, including those in collapsed rows."""
    for panel in document["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One expression of one panel."""

    board: str
    panel: str
    ref: str
    expression: str
    points: int
    series: tuple[Mapping[str, str], ...]
    empty_metrics: frozenset[str]
    """Of which no selector of the expression found any series."""
    empty_selectors: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.board}: {self.panel} [{self.ref}]: {self.expression}"


@dataclass(slots=True)
class Viewer:
    """An operator before a dashboard, who chose `chosen` where there was a choice."""

    server: DemoPrometheus
    chosen: Mapping[str, str] = field(default_factory=dict)

    def variables(self, document: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        """What there is to choose, by variable."""
        found: dict[str, tuple[str, ...]] = {}
        for variable in document["templating"]["list"]:
            if variable["type"] == "query":
                query = self.filled(variable["query"]["query"], self._values(document, found))
                found[variable["name"]] = tuple(self._ask(query, variable.get("regex", "")))
        return found

    def look(self, document: Mapping[str, Any]) -> Iterator[Asked]:
        """Every expression of every panel, and of the annotations."""
        values = self._values(document, self.variables(document))
        for panel in all_panels(document):
            for target in panel["targets"]:
                yield self._asked(document["uid"], panel["title"], target["refId"], target["expr"], values)
        for annotation in document["annotations"]["list"]:
            if "expr" in annotation:
                yield self._asked(document["uid"], annotation["name"], "Anno", annotation["expr"], values)

    def filled(self, text: str, values: Mapping[str, str]) -> str:
        seconds = max(1, round(self.server.end - self.server.start))
        built_in = {"__rate_interval": f"{RATE_INTERVAL_SECONDS}s", "__range": f"{seconds}s", "__interval": "15s"}
        known = {**built_in, **values}  # a test may say otherwise
        # "$1" is label_replace's, not Grafana's.
        return _VARIABLE.sub(lambda m: m[0] if m[1].isdigit() else known[m[1]], text)

    def _values(self, document: Mapping[str, Any], found: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """What stands for each variable in an expression."""
        said = {}
        for variable in document["templating"]["list"]:
            name = variable["name"]
            if name not in found:
                continue
            if name in self.chosen:
                said[name] = self.chosen[name]
            elif variable["includeAll"]:
                said[name] = variable.get("allValue") or "|".join(found[name])
            else:
                said[name] = found[name][0] if found[name] else ""
        return said

    def _ask(self, query: str, regex: str) -> list[str]:
        if values := _LABEL_VALUES.fullmatch(query):
            span = {"start": self.server.start, "end": self.server.end}
            return list(self.server.get(f"/api/v1/label/{values[2]}/values", **{"match[]": values[1]}, **span))
        result = _QUERY_RESULT.fullmatch(query)
        assert result, f"{query}: neither label_values nor query_result"
        lines = [
            "{" + ",".join(f'{k}="{v}"' for k, v in row.labels.items()) + f"}} {row.value} {self.server.end}"
            for row in self.server.query(result[1])
        ]
        pattern = re.compile(regex.strip("/"))
        return sorted({m[1] for line in lines if (m := pattern.search(line))})

    def _asked(self, board: str, panel: str, ref: str, written: str, values: Mapping[str, str]) -> Asked:
        expression = self.filled(written, values)
        series = self._run(expression)
        empty = [s for s in selectors(expression) if not self._run(f"count({s.text})")]
        full = {s.metric for s in selectors(expression) if s not in empty}
        return Asked(
            board=board,
            panel=panel,
            ref=ref,
            expression=expression,
            points=sum(len(s.points) for s in series),
            series=tuple(s.labels for s in series),
            empty_metrics=frozenset({s.metric for s in empty} - full),
            empty_selectors=tuple(s.text for s in empty),
        )

    def _run(self, expression: str) -> list[Any]:
        step = max(1.0, (self.server.end - self.server.start) / POINTS)
        return self.server.query_range(expression, step=step)
