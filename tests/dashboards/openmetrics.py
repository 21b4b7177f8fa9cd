"""Scrapes over time as one OpenMetrics text, which `promtool tsdb create-blocks-from openmetrics` makes a database of.

OpenMetrics wants all lines of a family together, all points of a series together and in order of time, and `# EOF`.
A series has `job` and `instance` as a scrape gives them, and `up` and its companions say how each scrape went.
"""

import gzip
from pathlib import Path

from prometheus_client.samples import Sample

from rolecall.agent.collectors.exporters.scrape import parse_page

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Recording:
    """What was scraped, by name and series."""

    def __init__(self) -> None:
        self._types: dict[str, str] = {}
        self._points: dict[str, dict[str, list[tuple[float, float]]]] = {}

    def scraped(self, at: float, job: str, instance: str, page: bytes | None, seconds: float = 0.0) -> None:
        """One scrape at `at` (seconds since 1970); `page` None: no one answered."""
        labels = {"job": job, "instance": instance}
        samples = parse_page(page).samples if page is not None else []
        own = {
            "up": float(page is not None),
            "scrape_duration_seconds": seconds,
            "scrape_samples_scraped": len(samples),
        }
        for line in (page or b"").decode().splitlines():
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ", 3)
                self._types[name] = kind
        for sample in samples + [Sample(name, {}, float(value)) for name, value in own.items()]:
            self._add(at, sample.name, {**sample.labels, **labels}, sample.value)

    def _add(self, at: float, name: str, labels: dict[str, str], value: float) -> None:
        pairs = ",".join(f'{k}="{v.translate(_ESCAPES)}"' for k, v in sorted(labels.items()))
        points = self._points.setdefault(name, {}).setdefault(pairs, [])
        if not points or points[-1][0] < at:
            points.append((at, value))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._points)

    def text(self) -> str:
        lines = []
        for name in sorted(self._points):
            # Only a counter by OpenMetrics' own rule is called one: dcgm-exporter's have no `_total`.
            counter = name.endswith("_total")
            family = name.removesuffix("_total") if counter else name
            gauge = self._types.get(name, "gauge") == "gauge"
            lines.append(f"# TYPE {family} {'counter' if counter else 'gauge' if gauge else 'unknown'}\n")
            for pairs, points in self._points[name].items():
                lines += [f"{name}{{{pairs}}} {value!r} {at:.3f}\n" for at, value in points]
        return "".join([*lines, "# EOF\n"])

    def write(self, path: Path) -> int:
        """Compressed, the same bytes for the same scrapes. Returns how many."""
        packed = gzip.compress(self.text().encode(), compresslevel=9, mtime=0)
        path.write_bytes(packed)
        return len(packed)
