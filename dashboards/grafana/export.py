"""Writes dashboards and rules as files. The same input gives the same bytes.

    dashboards/*.json                      each dashboard
    provisioning/dashboards/rolecall.yaml  loads them into Grafana
    provisioning/datasources/*.example     example data source
    rules/*.yaml                           alert and recording rules, for Prometheus

An existing file that rolecall did not write is never overwritten: then nothing is written at all.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rolecall.core.errors import ConfigError
from rolecall.core.rundir import write_atomically
from rolecall.core.text import plain
from rolecall.dashboards.grafana.board import TAG, document, incidents
from rolecall.dashboards.grafana.boards.health import health
from rolecall.dashboards.grafana.boards.node import gpus, network
from rolecall.dashboards.grafana.boards.replicas import replica, roles
from rolecall.dashboards.grafana.boards.run import overview, training
from rolecall.dashboards.grafana.boards.watched import watched

MARK = "# Written by `rolecall grafana export`. Changes are lost at the next export.\n"
"""First line of each YAML file that rolecall writes. Its dashboards are identified by uid and tag."""
FOLDER = "rolecall"
DASHBOARDS_PATH = "/var/lib/grafana/dashboards/rolecall"
FILE_BYTES_MAX = 4 << 20
"""A larger file was not written by rolecall."""

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
DATASOURCE = """# Set the address and save this file without `.example` in Grafana's provisioning/datasources.
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
    """Relative path -> text. `rules`: file name -> YAML. `dashboards_path`: where Grafana finds the JSON files."""
    made = {f"dashboards/{d['uid']}.json": json.dumps(d, indent=2, ensure_ascii=False) + "\n" for d in documents}
    provider = PROVIDER.format(folder=FOLDER, path=json.dumps(dashboards_path))  # JSON is YAML
    made["provisioning/dashboards/rolecall.yaml"] = MARK + provider
    made["provisioning/datasources/prometheus.yaml.example"] = MARK + DATASOURCE
    made.update({f"rules/{name}": MARK + text for name, text in rules.items()})
    return dict(sorted(made.items()))


def write(folder: Path, made: Mapping[str, str]) -> Sequence[Path]:
    """Writes all files, or none: raises ConfigError with every existing file that rolecall did not write."""
    foreign = [f"{folder / name}: {why}" for name in made if (why := _foreign(folder / name))]
    if foreign:
        raise ConfigError(foreign)
    for name, text in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, text)
    return [folder / name for name in made]


def _foreign(path: Path) -> str:
    """Why an existing file is not rolecall's; "" if it is, or does not exist."""
    if not path.exists() and not path.is_symlink():
        return ""
    if path.is_symlink() or not path.is_file():
        return "is not a regular file; move it away"
    if path.stat().st_size > FILE_BYTES_MAX:
        return "is larger than any file that rolecall writes; move it away"
    text = path.read_text(errors="replace")
    if path.suffix != ".json":
        return "" if text.startswith(MARK) else "was not written by rolecall; move it away"
    try:
        there = json.loads(text)
    except ValueError:
        there = None
    ours = isinstance(there, dict) and there.get("uid") == path.stem and TAG in (there.get("tags") or ())
    return "" if ours else "is not a dashboard of rolecall; move it away"


def documents(incidents_at: str = "") -> list[dict[str, Any]]:
    """JSON documents. `incidents_at`: URL of `rolecall dashboard` to link to; "" for none. Raises ConfigError."""
    if incidents_at:
        check_link("--incidents-at", incidents_at)
    links = incidents(incidents_at)
    boards = (overview(links), watched(links), training(), roles(), replica(links), gpus(), network(), health())
    return [document(board) for board in boards]


def check_link(option: str, given: str, placeholder: str = "") -> None:
    """Raises ConfigError: not an absolute URL that Grafana, Alertmanager or Slack can show as a link.
    `placeholder`: text that it may also contain."""
    address = given.replace(placeholder, "x") if placeholder else given
    if "@" in address:
        raise ConfigError([f"{option}: a link that everyone can see must not contain a password"])
    try:
        parts = urlsplit(address)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        valid = valid and not parts.query and not parts.fragment
    except ValueError:
        valid = False
    # Prometheus would expand {{ in an annotation.
    if not valid or not address.isprintable() or set(address) & set(" {}"):
        raise ConfigError([f"{option}: expected http[s]://HOST[:PORT][/PATH], got {plain(given, 200)!r}"])
