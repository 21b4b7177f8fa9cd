"""`rolecall watch agents`: one observing watch over the agents of any job, instrumented or not.

AGENTS is a list, or a file that is reread whenever it changes. The file has two forms. A name ending in `.json`,
`.yaml` or `.yml`: groups as Prometheus reads them (`file_sd_configs`), so that one file serves both; only the label
`__scheme__` (`https`) is used:

    - targets: [gpu-001:9477, gpu-002:9477]
      labels: {__scheme__: https}

Any other name: one `http[s]://HOST:PORT` or `NODE=http[s]://HOST:PORT` per line, `#` starts a comment.

The run directory holds only what the watch writes (run.json, the journal, the detectors' state), so
that `rolecall status`, `incidents` and `replay` work on it as on any other run.
"""

import json
import logging
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.config.job import JobConfig, parse_job, read_yaml
from rolecall.core.config.watched import WatchedConfig
from rolecall.core.errors import ConfigError, JournalError, RolecallError, RunNotFound
from rolecall.core.http import HttpFailed, request
from rolecall.core.ids import ID_PATTERN, ProcessId, checked_id, split_replica
from rolecall.core.journal.database import redacted, run_url
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir, create_run_dir
from rolecall.core.telemetry import UNCOUNTED, AgentEvent, AgentEventKind, ProcessSample
from rolecall.core.text import os_reason
from rolecall.detector.base.observation import Observation
from rolecall.recovery.interfaces import ObservationSource
from rolecall.recovery.nodes import WATCHED_FLAG

logger = logging.getLogger(__name__)

ASK_SECONDS = 3.0
"""Deadline for one agent to return its node name."""
CONCURRENT_REQUESTS = 32
ANSWER_BYTES_MAX = 64 * 1024
AGENTS_MAX = 4096
_NAMED = re.compile(r"([a-zA-Z0-9][a-zA-Z0-9_.-]{0,62})=(https?://.+)")
_ADDRESS = re.compile(r"[\w.-]+:\d{1,5}|\[[0-9a-fA-F:.]+\]:\d{1,5}")
_SCHEMES = ("http", "https")
RETRY_SECONDS = 10.0
"""Interval of queries to agents that did not answer; each costs a connection."""
FILE_BYTES_MAX = 4 << 20
GROUPS = (".json", ".yaml", ".yml")
SCHEME_LABEL = "__scheme__"
HELD_SECONDS = 15.0
"""A name stays assigned for this long after its process was last seen alive, unless that process was seen to end: an
agent may be a few polls behind."""
NUM_PLACES_MAX = 65_536
REPLICA_MAX = 999_999
_IN_CONFIG = {"recovery", "detector", "journal"}
"""What run.json holds as parts of a job; a journal's URL may have a password."""
NO_AGENTS: Mapping[str, str] = MappingProxyType({})
Named = TypeVar("Named", ProcessSample, AgentEvent)


def is_file(text: str) -> bool:
    """Whether AGENTS names a file."""
    return "://" not in text


def listed(text: str) -> list[str]:
    """The comma-separated agents in AGENTS. Raises ConfigError: none or too many are named, or an entry is not an
    address."""
    return checked_entries(text.split(","))


def checked_entries(lines: list[str]) -> list[str]:
    """Each `http[s]://HOST:PORT` or `NODE=...`, without comments and blanks. Raises ConfigError as `listed`."""

    entries = [entry for line in lines if (entry := line.partition("#")[0].strip())]
    wrong = []
    for entry in entries:
        try:
            parts = urlsplit(url_of(entry))
            valid = parts.scheme in _SCHEMES and parts.hostname and parts.port != 0
        except ValueError:
            valid = False
        wrong += [] if valid else [entry]
    if wrong:
        raise ConfigError([f"agents: {e!r} is neither http[s]://HOST:PORT nor NODE=http[s]://HOST:PORT" for e in wrong])
    if not 0 < len(entries) <= AGENTS_MAX:
        raise ConfigError([f"agents: expected 1 to {AGENTS_MAX} addresses, got {len(entries)}"])
    return entries


def url_of(entry: str) -> str:
    named = _NAMED.fullmatch(entry)
    return named.group(2) if named else entry


def named_agents(
    entries: list[str], query: Callable[[str], str] | None = None, former: Mapping[str, str] = NO_AGENTS
) -> dict[str, str]:
    """node -> URL. Agents whose node is not named are queried for it concurrently. `former`: as `former_agents`. Raises
    ConfigError: agents that do not answer and have no former node, or two of one node."""
    answered, problems = resolve_names(entries, query or node_of)
    names = _with_former(answered, entries, former)
    found, twice = _by_node(names.items())
    if twice or len(names) < len(set(entries)):
        raise ConfigError(problems + twice)
    for problem in problems:
        logger.warning("%s", problem)
    return found


def former_agents(root: Path, run_id: str) -> dict[str, str]:
    """node -> URL as the former watch of this run knew them. Empty: there was none."""
    try:
        agents = RunDir(root / run_id).read().get("agents")
    except (RunNotFound, OSError):
        return {}
    return {str(node): str(url) for node, url in agents.items()} if isinstance(agents, dict) else {}


def _with_former(names: Mapping[str, str], entries: Iterable[str], former: Mapping[str, str]) -> dict[str, str]:
    """entry -> node: `names`, and for an entry that does not answer the node that it had. A node that is down must be
    found unreachable: one that is not watched looks recovered. `former`: node -> URL."""
    taken = {*names.values()}
    node_at = {url: node for node, url in former.items() if node not in taken}
    silent = {e: node_at[url_of(e)] for e in entries if e not in names and url_of(e) in node_at}
    return {**names, **silent}


def _by_node(named: Iterable[tuple[str, str]]) -> tuple[dict[str, str], list[str]]:
    """`named`: (entry, node). node -> URL of the first of each node, and the problem that another one is."""
    found: dict[str, str] = {}
    problems = []
    for entry, node in named:
        if node in found:
            problems.append(f"agents: {found[node]} and {url_of(entry)} both report node {node}")
        else:
            found[node] = url_of(entry)
    return found, problems


def resolve_names(entries: list[str], query: Callable[[str], str]) -> tuple[dict[str, str], list[str]]:
    """entry -> node of those that are named or answer, and why the others are missing. Queried concurrently."""
    names: dict[str, str] = {}
    problems = []
    with ThreadPoolExecutor(max_workers=CONCURRENT_REQUESTS) as pool:
        answers = pool.map(lambda entry: _named(entry, query), entries)
        for entry, (node, problem) in zip(entries, answers, strict=True):
            if problem:
                hint = f"start the agent, or name its node yourself: NODE={url_of(entry)}"
                problems.append(f"agents: {entry}: {problem}; {hint}")
            else:
                names[entry] = node
    return names, problems


def _named(entry: str, query: Callable[[str], str]) -> tuple[str, str]:
    """Node of one entry, or why it is unknown."""
    named = _NAMED.fullmatch(entry)
    if named:
        return named.group(1).lower(), ""
    try:
        return query(entry), ""
    except (HttpFailed, ValueError, KeyError, TypeError, AttributeError) as e:
        return "", f"no agent answers there ({str(e) or type(e).__name__})"


def node_of(url: str, authorization: str = "") -> str:
    """The name of the node whose agent serves at `url` (`/healthz`). `authorization`: value of that header. Raises
    HttpFailed, ValueError, KeyError, TypeError, AttributeError: no agent answers there."""
    headers = {"Authorization": authorization} if authorization else {}
    answer = request(
        "GET", url.rstrip("/") + "/healthz", headers=headers, deadline_seconds=ASK_SECONDS, bytes_max=ANSWER_BYTES_MAX
    )
    response = json.loads(answer.body)
    if answer.status == HTTPStatus.UNAUTHORIZED or response.keys() == {"ok"}:  # without a user: only that it is alive
        raise ValueError("it requires a user or a token: --credentials")
    node = response["node"]
    if not isinstance(node, str) or not ID_PATTERN.fullmatch(node):
        raise ValueError("it does not report a node name")
    return node


def entries_of(path: Path) -> list[str]:
    """The entries of the file. Raises ConfigError: it cannot be read or has invalid entries; lists every problem."""
    try:
        with path.open(encoding="utf-8") as f:
            text = f.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            raise ValueError(f"more than {FILE_BYTES_MAX} characters")
        if path.suffix in GROUPS:
            return checked_entries(_of_groups(read_yaml(text)))
    except (OSError, ValueError) as e:
        hint = f"; if that is an agent, write http://{path}" if _ADDRESS.fullmatch(str(path)) else ""
        raise ConfigError([f"agents: {path}: {os_reason(e)}{hint}"]) from None
    return checked_entries(text.splitlines())


def _of_groups(value: Any) -> list[str]:
    """Raises ValueError: `value` is not a list of groups."""
    if not isinstance(value, list):
        raise ValueError("expected a list of groups with targets, as in Prometheus' file_sd_configs")  # noqa: TRY004
    found = []
    for number, group in enumerate(value):
        targets = group.get("targets") if isinstance(group, dict) else None
        labels = (group.get("labels") or {}) if isinstance(group, dict) else {}
        if not isinstance(targets, list) or not isinstance(labels, dict):
            raise ValueError(f"group {number}: expected targets (a list) and optionally labels (a mapping)")  # noqa: TRY004
        found += [f"{labels.get(SCHEME_LABEL, 'http')}://{target}" for target in targets]
    return found


class AgentsFile:
    """The current agents of a file.

    If it is damaged or missing, the last valid list is kept and the reason logged once. An agent that does not report
    its node name is logged once and queried again; until it answers it has its former node, or is left out if that is
    not known either. Agents removed from the file are no longer watched.

    `ask`: node of an agent by its address; may raise like `node_of`. `keep`: called with the agents whenever
    they change. Both are called in a separate thread, so that `urls` never blocks. `former`: as `former_agents`."""

    def __init__(
        self,
        path: Path,
        ask: Callable[[str], str],
        keep: Callable[[Mapping[str, str]], None],
        clock: Clock,
        former: Mapping[str, str] = NO_AGENTS,
    ) -> None:
        self._path, self._ask, self._keep, self._clock = path, ask, keep, clock
        self._names: dict[str, str] = {}  # entry -> node, of those that are named or have answered
        self._found: Mapping[str, str] = former  # node -> URL; replaced, never changed
        self._doubted: set[str] = set()  # nodes whose agents answer for another one
        self._read_state: tuple[int, int, int] | None = None
        self._read_at = float("-inf")
        self._retry_at = float("inf")
        self._logged: set[str] = set()
        self._thread: threading.Thread | None = None

    def first(self) -> Mapping[str, str]:
        """The current agents: node -> URL. Waits for their answers. Raises ConfigError: the file is invalid, or the
        node of none of its agents is known."""
        self._read_state = self._state()
        problems = self._resolve(entries_of(self._path))
        if not self._found:
            raise ConfigError(problems)
        self._log_new(problems)
        return self._found

    def urls(self) -> Mapping[str, str]:
        """node -> URL as last read; starts another read if the file changed or an agent did not answer."""
        if self._thread is None or not self._thread.is_alive():
            state = self._state()
            if state != self._read_state or self._clock.monotonic() >= self._retry_at:
                self._read_state, self._read_at = state, self._clock.monotonic()
                self._thread = threading.Thread(target=self._reread, name="agents-file", daemon=True)
                self._thread.start()
        return self._found

    def doubt(self, node: str) -> None:
        """The agent at the address of this node answers for another one: the node was renamed, or another one has its
        address now. It is queried again, at most every `RETRY_SECONDS`."""
        self._doubted.add(node)
        self._retry_at = min(self._retry_at, self._read_at + RETRY_SECONDS)

    def _state(self) -> tuple[int, int, int] | None:
        """Changes when the file is written or replaced; None: no such file."""
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _reread(self) -> None:
        before = self._found
        try:
            self._log_new(self._resolve(entries_of(self._path)))
            if self._found != before:
                logger.info("%s: %d agents, were %d", self._path, len(self._found), len(before))
                self._keep(self._found)
        except ConfigError as e:
            self._retry_at = float("inf")  # until the file changes
            self._log_new(list(e.problems))
        except (OSError, JournalError) as e:  # from `keep`; the list itself is valid
            self._log_new([f"agents: {self._path}: {os_reason(e)}"])

    def _resolve(self, entries: list[str]) -> list[str]:
        """Makes these the agents; returns why some are missing."""
        doubted, self._doubted = self._doubted, set()
        listed, problems = set(entries), list[str]()
        known = {e: n for e, n in self._names.items() if e in listed and n not in doubted}
        asked, names = [e for e in entries if e not in known], dict[str, str]()
        while asked:
            answers, more = resolve_names(asked, self._ask)
            names |= answers
            problems += more
            # An entry that had one of these nodes may have another one by now, as after a swap of two addresses.
            nodes = {*answers.values()}
            asked = [e for e, n in known.items() if n in nodes]
            known = {e: n for e, n in known.items() if n not in nodes}
        names |= known
        self._names = {e: names[e] for e in entries if e in names}
        self._found, twice = _by_node(_with_former(self._names, entries, self._found).items())
        missing = len(names) < len(listed)
        self._retry_at = self._clock.monotonic() + RETRY_SECONDS if missing else float("inf")
        return problems + twice

    def _log_new(self, problems: list[str]) -> None:
        """Logs each problem once while it lasts."""
        for problem in problems:
            if problem not in self._logged:
                logger.warning("%s", problem)
        self._logged = set(problems)


def watched_job(run_id: str, webhook_url: str | None, watched: WatchedConfig | None) -> JobConfig:
    """The configuration of a watch, as `observing_run` writes it. Raises InvalidId, ConfigError."""
    checked_id(run_id, "run id")
    watched = watched or WatchedConfig()
    recovery = watched.recovery.model_dump(mode="json")
    recovery["webhook_url"] = webhook_url or recovery["webhook_url"]
    detector = watched.detector.model_dump(mode="json")
    return parse_job({"name": run_id, "recovery": recovery, "detector": detector, "journal": watched.journal})


def observing_run(
    root: Path,
    run_id: str,
    agents: Mapping[str, str],
    webhook_url: str | None = None,
    watched: WatchedConfig | None = None,
    clock: Clock | None = None,
) -> RunDir:
    """A run directory for a watch over these agents; continues one that a watch created under this name. `webhook_url`
    replaces that of the configuration. `watched`: of the watch file; None: none was given.

    Raises:
        InvalidId: `run_id` is not valid. ConfigError: the name belongs to a run that rolecall started, or to a watched
        one whose journal is elsewhere; the SQLite file of the watch file is another run's.
        JournalError: the journal cannot be created or opened.
    """
    job = watched_job(run_id, webhook_url, watched)
    run, created_at = RunDir((root / run_id).resolve()), (clock or SystemClock()).wall()
    if run.path.exists():
        if "agents" not in run.read():
            raise ConfigError([f"--id: {run_id!r} is a run that rolecall started itself, in {root}"])
        if job.journal is not None and run_url(job.journal, run.run_id) != run.database_url:
            where = redacted(run.database_url)
            raise ConfigError([f"journal: {run_id!r} has its journal at {where}; another journal needs another --id"])
        created_at = run.created_at
    else:
        run = _created(root, run_id, job.journal)
    run.write(
        {
            "run_id": run_id,
            "created_at": created_at,
            "config": job.model_dump(mode="json"),
            "agents": dict(agents),
            "watched": None if watched is None else watched.model_dump(mode="json", exclude=_IN_CONFIG),
        }
    )
    with closing(Journal(run.database_url)) as journal:  # creates it, so that other commands can read it
        journal.set_flag(WATCHED_FLAG, " ".join(sorted(agents)))
    return run


def _created(root: Path, run_id: str, journal: str | None) -> RunDir:
    """Run directory and journal: both, or neither. A journal in PostgreSQL may be that of a watch on another host."""
    run = create_run_dir(root, run_id, journal)
    try:
        with closing(Journal(run.database_url)) as opened:
            shared = not run.database_url.startswith("sqlite") and opened.flag(WATCHED_FLAG) is not None
            if opened.head().position and not shared:
                raise ConfigError([f"journal: {opened.store.where} holds the journal of another run"])
    except (RolecallError, OSError):
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    return run


@dataclass(slots=True)
class _ReplicaHolder:
    process: ProcessId
    at: float  # wall seconds of the watch


class UniqueReplicaSource:
    """Passes on the observations of a source with unique names. Called from one thread.

    Agents of two nodes may assign the same name. They number processes of an uninstrumented job independently: by the
    number in their node's name (`a-1` and `b-1` share it), or as the first trainer of a node that also has another
    job's first trainer. The detectors would treat both as one rank and compare a process with the history of another.

    A (replica, rank) belongs to the first node on which it is seen alive, until its process there ends or is no longer
    seen. If another node claims it before, its replica on that node is permanently renamed, with a number derived from
    both names; samples and events use the new name. This is logged once with the remedy. Processes with an incarnation,
    which rolecall started, are never renamed.

    `ending`: processes that this watch ends or has ended. They hold no name: a replacement may start on another node
    while they linger, or before their end is known.
    """

    def __init__(
        self, source: ObservationSource, ending: Callable[[], Collection[ProcessId]] = frozenset[ProcessId]
    ) -> None:
        self._source, self._ending = source, ending
        self._holders: dict[tuple[str, int], _ReplicaHolder] = {}
        self._renamed: dict[tuple[str, str], str] = {}  # (node, replica as its agent names it) -> new name

    def poll(self, timeout_seconds: float) -> Observation:
        seen: Observation = self._source.poll(timeout_seconds)
        samples = [s for b in seen.batches for s in b.processes]
        ended = {e.process for e in seen.events if e.kind == AgentEventKind.EXITED}
        ended |= {s.process for s in samples if not s.alive} | {*self._ending()}
        if ended:
            self._holders = {name: h for name, h in self._holders.items() if h.process not in ended}
        for sample in samples:
            if sample.process not in ended:  # else it is from before the end
                self._claim(sample, seen.wall_at)
        if not self._renamed:
            return seen
        batches = tuple(replace(b, processes=tuple(self._with_new_names(b.processes))) for b in seen.batches)
        return replace(seen, batches=batches, events=tuple(self._with_new_names(seen.events)))

    def _claim(self, sample: ProcessSample, now: float) -> None:
        node, replica = sample.process.node, sample.replica
        if sample.incarnation != UNCOUNTED or (node, replica) in self._renamed:
            return
        name = replica, sample.rank
        held = self._holders.get(name)
        if held is None and len(self._holders) >= NUM_PLACES_MAX:
            self._holders = {p: h for p, h in self._holders.items() if now - h.at <= HELD_SECONDS}
        # A clock that was set back must not keep a name assigned for an hour.
        if held is None or held.process.node == node or not 0.0 <= now - held.at <= HELD_SECONDS:
            self._holders[name] = _ReplicaHolder(sample.process, now)
            return
        number = zlib.crc32(f"{node} {replica}".encode()) % REPLICA_MAX + 1
        self._renamed[node, replica] = other = f"{split_replica(replica)[0]}/{number}"
        logger.warning(
            "%s rank %d is alive on %s and on %s: the one on %s is renamed to %s. If jobs share nodes, set "
            "jobs.rules.by_job for their agents; otherwise give these nodes different jobs.rules.node_index",
            *(replica, sample.rank, held.process.node, node, node, other),
        )

    def _with_new_names(self, named: Iterable[Named]) -> Iterable[Named]:
        for one in named:
            process = one.process
            other = self._renamed.get((process.node, one.replica)) if process and one.incarnation == UNCOUNTED else None
            yield one if other is None else replace(one, replica=other)
