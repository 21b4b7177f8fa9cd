"""Raw material of one incident. Must be redacted (redaction.py) before it leaves the run.

Journal events with their causes, the windows that the diagnosis used, collected evidence, agent events of the suspects'
nodes, log lines of agents and watch, versions. The job's own output is never included, because it contains prompts and
samples.
"""

import json
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rolecall.core.errors import CommandRefused, ConfigError
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir, bearer_token
from rolecall.recovery.operators import commands
from rolecall.reports.redaction import Redactor

FORMAT = 1
EVIDENCE_DIR = "evidence"
"""In the run directory, one folder per incident (rolecall/watch/evidence/pull.py)."""
EVIDENCE_BYTES_MAX = 64 << 20
"""Per incident, the limit of evidence collection."""
BEFORE_SECONDS = 120.0
AFTER_SECONDS = 60.0
"""Agent events and logs are included from this long before the onset to this long after the incident's last event."""
MEMBER_BYTES_MAX = 2 << 20
"""Per log or node; the oldest lines are kept, because they are nearest to the onset."""
READ_BYTES_MAX = 256 << 20
"""Per log; only the end of a longer one is searched."""
LINE_BYTES_MAX = 64 << 10
NUM_CAUSES_MAX = 100
_PACKAGES = ("torch", "ray", "vllm", "nvidia-ml-py", "py-spy", "psutil")


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRecord:
    run_id: str
    summary: Mapping[str, Any]  # as `rolecall incidents ID --json`
    diagnosis: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]  # of the journal, oldest first, causes included
    windows: Mapping[str, Any]
    agent_events: Mapping[str, Sequence[Mapping[str, Any]]]  # by node
    logs: Mapping[str, str]  # file name -> lines of the slice
    versions: Mapping[str, Any]
    left_out: Sequence[str]
    evidence: Mapping[str, bytes] = field(default_factory=dict)  # file name -> content, as pulled and redacted once

    @property
    def is_open(self) -> bool:
        return self.summary["closed_at"] is None and self.summary["set_aside"] is None

    @property
    def suspects(self) -> list[Mapping[str, Any]]:
        return list(self.diagnosis["suspects"])

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes of the suspects, in the diagnosis's order."""
        return tuple(dict.fromkeys(str(s["node"]) for s in self.suspects))


def gather(run: RunDir, incident_id: str) -> IncidentRecord:
    """Raises:
    ConfigError: there is no such incident, or nothing of it can be read.
    JournalError: the journal cannot be used.
    """
    try:
        (record,) = commands.incidents(run, incident_id)
    except CommandRefused as e:
        raise ConfigError([f"ID: {e}"]) from None
    summary = {k: v for k, v in record.items() if k not in ("diagnosis", "events")}
    diagnosis, events = record["diagnosis"], record["events"]
    journal = Journal(run.database_url, create=False)
    try:
        causes, windows = _causes(journal, events), journal.windows(incident_id)
    finally:
        journal.close()
    newest = max(float(e["wall_at"]) for e in events)
    since, until = float(diagnosis["onset"]) - BEFORE_SECONDS, newest + AFTER_SECONDS
    left_out: list[str] = []
    nodes = sorted({str(s["node"]) for s in diagnosis["suspects"]})
    return IncidentRecord(
        run_id=str(run.run_id),
        summary=summary,
        diagnosis=diagnosis,
        events=sorted([*causes, *events], key=lambda e: int(e["seq"])),
        windows=windows,
        agent_events={n: found for n in nodes if (found := _agent_events(run, n, since, until, left_out))},
        logs=_logs(run, nodes, since, until, left_out),
        versions=_versions(run),
        left_out=left_out,
        evidence=_evidence(run, incident_id, left_out),
    )


def _causes(journal: Journal, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The transitive causes of these events that do not belong to the incident."""
    have = {f"e{e['seq']}" for e in events}
    found: list[dict[str, Any]] = []
    wanted = [e["caused_by"] for e in events]
    while wanted and len(found) < NUM_CAUSES_MAX:
        name = wanted.pop()
        if name is None or name in have or not str(name)[1:].isdigit():
            continue
        have.add(name)
        for event in journal.events(after=int(name[1:]) - 1, limit=1):
            found.append(event.to_dict())
            wanted.append(event.caused_by)
    return found


def _agent_events(run: RunDir, node: str, since: float, until: float, left_out: list[str]) -> list[dict[str, Any]]:
    path = run.node_dir(node) / "events.jsonl"
    found, size = [], 0
    for line in _lines(path, left_out):
        with suppress(ValueError, TypeError, KeyError):  # a torn line
            event = json.loads(line)
            if not since <= float(event["wall_at"]) <= until:
                continue
            size += len(line)
            if size > MEMBER_BYTES_MAX:
                left_out.append(f"events of {node} after the first {MEMBER_BYTES_MAX} bytes")
                break
            found.append(event)
    return found


def _logs(run: RunDir, nodes: Sequence[str], since: float, until: float, left_out: list[str]) -> dict[str, str]:
    """Logs of the watch and the suspects' agents: lines with a timestamp in range. Continuation lines (tracebacks) are
    left out."""
    found = {}
    for name in ("watch", *(f"agent-{n}" for n in nodes)):
        taken, size = [], 0
        for line in _lines(run.logs / f"{name}.log", left_out):
            at = _logged_at(line)
            if at is None or not since <= at <= until:
                continue
            size += len(line)
            if size > MEMBER_BYTES_MAX:
                left_out.append(f"{name}.log after the first {MEMBER_BYTES_MAX} bytes")
                break
            taken.append(line)
        if taken:
            found[f"{name}.log"] = "\n".join(taken) + "\n"
    return found


def _evidence(run: RunDir, incident_id: str, left_out: list[str]) -> dict[str, bytes]:
    """Evidence files. The incident ID comes from the journal and is untrusted: it is compared, never joined to a
    path."""
    found, size = dict[str, bytes](), 0
    with suppress(FileNotFoundError):
        folders = [p for p in (run.path / EVIDENCE_DIR).iterdir() if p.name == incident_id and p.is_dir()]
        for path in sorted(p for folder in folders for p in folder.iterdir()):
            if path.name.startswith(".") or path.is_symlink() or not path.is_file():
                continue
            size += path.stat().st_size
            if size > EVIDENCE_BYTES_MAX:
                left_out.append(f"evidence/{path.name}: over {EVIDENCE_BYTES_MAX} bytes")
                break
            found[path.name] = path.read_bytes()
    return found


def _lines(path: Path, left_out: list[str]) -> Iterator[str]:
    try:
        with path.open("rb") as f:
            skipped = max(0, path.stat().st_size - READ_BYTES_MAX)
            if skipped:
                left_out.append(f"the first {skipped} bytes of {path.name} were not searched")
                f.seek(skipped)
                f.readline()
            while line := f.readline(LINE_BYTES_MAX):
                yield line.decode("utf-8", "replace").rstrip("\n")
    except FileNotFoundError:
        return
    except OSError as e:
        left_out.append(f"{path.name}: {e.strerror}")


def _logged_at(line: str) -> float | None:
    """Wall seconds of a line in `logging`'s format, `2026-01-31 12:00:00,250 ...` in this machine's local time."""
    try:
        return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
    except ValueError:
        return None


def _versions(run: RunDir) -> dict[str, Any]:
    """Versions of the run at its start, and of the exporting machine, whose packages should match the nodes'."""
    value = run.read()
    here = {"python": platform.python_version(), "platform": sys.platform}
    for package in ("rolecall", *_PACKAGES):
        with suppress(metadata.PackageNotFoundError):
            here[package] = metadata.version(package)
    kept = ("config_digest", "seed", "versions")
    return {"format": FORMAT, "run": {k: value[k] for k in kept if k in value}, "exported_with": here}


def run_redactor(run: RunDir, *, nodes: Iterable[str] = (), anonymous: bool = False) -> Redactor:
    """A redactor that knows the run's secrets, owner, folders and nodes; `nodes` get the first numbers."""
    secrets: list[str] = []
    with suppress(OSError):
        token = run.token()
        secrets = [token, bearer_token(token)]
    users: list[str] = []
    with suppress(OSError, KeyError, NotImplementedError):
        users.append(run.path.owner())
    known = Redactor(
        secrets=secrets,
        users=users,
        folders={str(run.path): "RUN", str(run.path.parent): "RUNS"},
        nodes=nodes,
        anonymous=anonymous,
    )
    with suppress(OSError):
        known.learn([p.name for p in sorted((run.path / "nodes").iterdir())], "nodes")
    started = run.read()
    known.learn([*started.get("nodes", ()), *started.get("agents", ())], "nodes")
    return known


def redactor(run: RunDir, material: IncidentRecord, *, anonymous: bool) -> Redactor:
    """A redactor that also knows all names in the material."""
    known = run_redactor(run, nodes=material.nodes, anonymous=anonymous)
    for part in (material.summary, material.diagnosis, material.events, material.windows, material.agent_events):
        known.learn(part)
    known.learn(list(material.logs.values()))
    return known
