"""All that Grafana and Prometheus read, as files: the same input gives the same bytes.

    dashboards/*.json                      each dashboard
    provisioning/dashboards/rolecall.yaml  tells Grafana to load them
    provisioning/datasources/*.example     a data source, for a Grafana that has none
    rules/*.yaml                           alert and recording rules, for Prometheus

A file that is there and is not ours is never overwritten: then nothing is written at all.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolecall.core.errors import ConfigError
from rolecall.core.rundir import write_atomically
from rolecall.dashboards.grafana.board import TAG

MARK = "# Made by `rolecall grafana export`; made again, changes are lost.\n"
"""First line of each YAML file of ours. A dashboard of ours is known by its uid and tag."""
FOLDER = "rolecall"
"""Of Grafana, where the dashboards stand."""
DASHBOARDS_PATH = "/var/lib/grafana/dashboards/rolecall"
FILE_BYTES_MAX = 4 << 20
"""A larger file is not ours."""

PROVIDER = """apiVersion: 1
providers:
  - name: rolecall
    folder: {folder}
    type: file
    disableDeletion: false
    allowUiUpdates: false
    updateIntervalSeconds: 60
    options:
      path: {path}
"""
DATASOURCE = """# Fill in the address, and save it without `.example` in Grafana's provisioning/datasources.
apiVersion: 1
datasources:
  - name: Prometheus
    type: prometheus
    access: proxy
    url: http://localhost:9090
    jsonData:
      # The scrape interval of deploy/prometheus.yaml: $__rate_interval is four times it.
      timeInterval: 15s
"""


def files(documents: Iterable[Mapping[str, Any]], rules: Mapping[str, str], dashboards_path: str) -> dict[str, str]:
    """Path below the folder, and text. `rules`: file name and YAML. `dashboards_path`: where Grafana will find the JSON."""
    made = {f"dashboards/{d['uid']}.json": json.dumps(d, indent=2, ensure_ascii=False) + "\n" for d in documents}
    provider = PROVIDER.format(folder=FOLDER, path=json.dumps(dashboards_path))  # JSON is YAML
    made["provisioning/dashboards/rolecall.yaml"] = MARK + provider
    made["provisioning/datasources/prometheus.yaml.example"] = MARK + DATASOURCE
    made.update({f"rules/{name}": MARK + text for name, text in rules.items()})
    return dict(sorted(made.items()))


def write(folder: Path, made: Mapping[str, str]) -> Sequence[Path]:
    """Writes all, or raises ConfigError with every file that stands in the way and writes none."""
    foreign = [f"{folder / name}: {why}" for name in made if (why := _foreign(folder / name))]
    if foreign:
        raise ConfigError(foreign)
    for name, text in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, text)
    return [folder / name for name in made]


def _foreign(path: Path) -> str:
    """Why a file that stands there is not ours; "" if it is, or there is none."""
    if not path.exists() and not path.is_symlink():
        return ""
    if path.is_symlink() or not path.is_file():
        return "is no plain file; move it away"
    if path.stat().st_size > FILE_BYTES_MAX:
        return "is larger than any file of rolecall's; move it away"
    text = path.read_text(errors="replace")
    if path.suffix != ".json":
        return "" if text.startswith(MARK) else "was not made by rolecall; move it away"
    try:
        there = json.loads(text)
    except ValueError:
        there = None
    ours = isinstance(there, dict) and there.get("uid") == path.stem and TAG in (there.get("tags") or ())
    return "" if ours else "is no dashboard of rolecall's; move it away"
