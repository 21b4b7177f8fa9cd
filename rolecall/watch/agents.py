"""`rolecall watch agents`: one observing watch over the agents of any job, instrumented or not.

The run directory holds only what the watch writes (run.json, the journal, the detectors' state), so
that `rolecall status`, `incidents` and `replay` work on it as on any other run.
"""

import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from rolecall.core.config.job import parse_job
from rolecall.core.errors import ConfigError
from rolecall.core.http import HttpFailed, request
from rolecall.core.ids import ID_PATTERN, checked_id
from rolecall.core.journal.journal import Journal
from rolecall.core.rundir import RunDir, create_run_dir

ASK_SECONDS = 3.0
"""Deadline for one agent to return its node name."""
CONCURRENT_REQUESTS = 32
ANSWER_BYTES_MAX = 64 * 1024
AGENTS_MAX = 4096
_NAMED = re.compile(r"([a-z0-9][a-z0-9_.-]{0,62})=(https?://.+)")
_SCHEMES = ("http", "https")


def is_file(text: str) -> bool:
    """Whether AGENTS names a file (agents_file.py)."""
    return "://" not in text


def listed(text: str) -> list[str]:
    """The comma-separated agents in AGENTS.

    Raises:
        ConfigError: none or too many are named, or an entry is not an address.
    """
    return checked_entries(text.split(","))


def checked_entries(lines: list[str]) -> list[str]:
    """Each `http[s]://HOST:PORT` or `NODE=...`, without comments and blanks. Raises ConfigError as `listed`."""
    entries = [entry for line in lines if (entry := line.partition("#")[0].strip())]
    wrong = [e for e in entries if not _is_address(url_of(e))]
    if wrong:
        raise ConfigError([f"agents: {e!r} is neither http[s]://HOST:PORT nor NODE=http[s]://HOST:PORT" for e in wrong])
    if not 0 < len(entries) <= AGENTS_MAX:
        raise ConfigError([f"agents: expected 1 to {AGENTS_MAX} addresses, got {len(entries)}"])
    return entries


def url_of(entry: str) -> str:
    named = _NAMED.fullmatch(entry)
    return named.group(2) if named else entry


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def named_agents(entries: list[str], query: Callable[[str], str] | None = None) -> dict[str, str]:
    """node -> URL. Agents whose node is not named are queried for it concurrently.

    Raises:
        ConfigError: agents that do not answer, or two of one node.
    """
    names, problems = resolve_names(entries, query or node_of)
    found: dict[str, str] = {}
    for entry, node in names.items():
        if node in found:
            problems.append(f"agents: {found[node]} and {url_of(entry)} both report node {node}")
        found[node] = url_of(entry)
    if problems:
        raise ConfigError(problems)
    return found


def resolve_names(entries: list[str], query: Callable[[str], str]) -> tuple[dict[str, str], list[str]]:
    """entry -> node of those that are named or answer, and why the others are missing. Queried concurrently."""
    names: dict[str, str] = {}
    problems = []
    with ThreadPoolExecutor(max_workers=CONCURRENT_REQUESTS) as pool:
        answers = pool.map(lambda entry: _named(entry, query), entries)
        for entry, (node, problem) in zip(entries, answers, strict=True):
            if problem:
                problems.append(f"agents: {entry}: {problem}; start it first, or write NODE={url_of(entry)}")
            else:
                names[entry] = node
    return names, problems


def _named(entry: str, query: Callable[[str], str]) -> tuple[str, str]:
    """Node of one entry, or why it is unknown."""
    named = _NAMED.fullmatch(entry)
    if named:
        return named.group(1), ""
    try:
        return query(entry), ""
    except (HttpFailed, ValueError, KeyError, TypeError, AttributeError) as e:
        return "", f"no agent answers there ({str(e) or type(e).__name__})"


def node_of(url: str, authorization: str = "") -> str:
    """The name of the node whose agent serves at `url` (`/healthz`). `authorization`: value of that header.

    Raises:
        HttpFailed, ValueError, KeyError, TypeError, AttributeError: no agent answers there.
    """
    headers = {"Authorization": authorization} if authorization else {}
    answer = request(
        "GET", url.rstrip("/") + "/healthz", headers=headers, deadline_seconds=ASK_SECONDS, bytes_max=ANSWER_BYTES_MAX
    )
    response = json.loads(answer.body)
    # To unauthenticated clients an agent reports only that it is alive; older ones refuse.
    if answer.status == HTTPStatus.UNAUTHORIZED or response.keys() == {"ok"}:
        raise ValueError("it requires a user or a token: --credentials")
    node = response["node"]
    if not isinstance(node, str) or not ID_PATTERN.fullmatch(node):
        raise ValueError("it does not report a node name")
    return node


def observing_run(root: Path, run_id: str, agents: Mapping[str, str], webhook_url: str | None = None) -> RunDir:
    """A run directory for a watch over these agents; continues one that a watch created under this name.

    Raises:
        InvalidId: `run_id` is not valid.
        ConfigError: the name belongs to a run that rolecall started.
    """
    checked_id(run_id, "run id")
    value = {"name": run_id, "recovery": {"mode": "observe", "webhook_url": webhook_url}}
    config = parse_job(value).model_dump(mode="json")
    run = RunDir((root / run_id).resolve())
    if run.path.exists():
        if "agents" not in run.read():
            raise ConfigError([f"--id: {run_id!r} is a run that rolecall started itself, in {root}"])
    else:
        run = create_run_dir(root, run_id)
    run.write({"run_id": run_id, "config": config, "agents": dict(agents)})
    Journal(run.database_url).close()  # creates it, so that other commands can read it
    return run
