"""The file of `watch agents FILE`: the list of agents, reread whenever it changes.

Two forms. A name ending in `.json`, `.yaml` or `.yml`: groups as Prometheus reads them (`file_sd_configs`), so that one
file serves both; only the label `__scheme__` (`https`) is used:

    - targets: [gpu-001:9477, gpu-002:9477]
      labels: {__scheme__: https}

Any other name: one `http[s]://HOST:PORT` or `NODE=http[s]://HOST:PORT` per line, `#` starts a comment.

If the file is damaged or missing, the last valid list is kept and the reason logged once. An agent that does not report
its node name is left out, logged once and queried again. Agents removed from the file are no longer watched.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rolecall.core.clock import Clock
from rolecall.core.config.job import read_yaml
from rolecall.core.errors import ConfigError
from rolecall.watch.agents import checked_entries, resolve_names, url_of

logger = logging.getLogger(__name__)

RETRY_SECONDS = 10.0
"""Interval of queries to agents that did not answer; each costs a connection."""
FILE_BYTES_MAX = 4 << 20
GROUPS = (".json", ".yaml", ".yml")
SCHEME_LABEL = "__scheme__"


def entries_of(path: Path) -> list[str]:
    """The entries of the file.

    Raises:
        ConfigError: it cannot be read or has invalid entries; lists every problem.
    """
    try:
        with path.open(encoding="utf-8") as f:
            text = f.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            raise ValueError(f"more than {FILE_BYTES_MAX} characters")
        if path.suffix in GROUPS:
            return checked_entries(_of_groups(read_yaml(text)))
    except (OSError, ValueError) as e:
        raise ConfigError([f"agents: {path}: {e}"]) from None
    return checked_entries(text.splitlines())


def _of_groups(value: Any) -> list[str]:
    """Raises ValueError: `value` is not a list of groups."""
    if not isinstance(value, list):
        raise ValueError("expected a list of groups with targets, as in Prometheus' file_sd_configs")  # noqa: TRY004
    found = []
    for n, group in enumerate(value):
        targets = group.get("targets") if isinstance(group, dict) else None
        labels = (group.get("labels") or {}) if isinstance(group, dict) else {}
        if not isinstance(targets, list) or not isinstance(labels, dict):
            raise ValueError(f"group {n}: expected targets (a list) and optionally labels (a mapping)")  # noqa: TRY004
        found += [f"{labels.get(SCHEME_LABEL, 'http')}://{target}" for target in targets]
    return found


class AgentsFile:
    """`ask`: node of an agent by its address; may raise like `agents.node_of`. `keep`: called with the agents whenever
    they change. Both are called in a separate thread, so that `urls` never blocks."""

    def __init__(
        self, path: Path, ask: Callable[[str], str], keep: Callable[[Mapping[str, str]], None], clock: Clock
    ) -> None:
        self._path, self._ask, self._keep, self._clock = path, ask, keep, clock
        self._names: dict[str, str] = {}  # entry -> node
        self._found: dict[str, str] = {}  # node -> URL; replaced, never changed
        self._read_state: tuple[int, int, int] | None = None
        self._retry_at = float("inf")
        self._logged: set[str] = set()
        self._thread: threading.Thread | None = None

    def first(self) -> dict[str, str]:
        """The current agents: node -> URL. Waits for their answers.

        Raises:
            ConfigError: the file is invalid, or none of its agents reports its node.
        """
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
                self._read_state = state
                self._thread = threading.Thread(target=self._reread, name="agents-file", daemon=True)
                self._thread.start()
        return self._found

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
        except OSError as e:  # from `keep`; the list itself is valid
            self._log_new([f"agents: {self._path}: {e}"])

    def _resolve(self, entries: list[str]) -> list[str]:
        """Makes these the agents; returns why some are missing."""
        names, problems = resolve_names([e for e in entries if e not in self._names], self._ask)
        self._names = {e: n for e, n in {**self._names, **names}.items() if e in entries}
        found: dict[str, str] = {}
        for entry in entries:
            node = self._names.get(entry)
            if node in found:
                problems.append(f"agents: {found[node]} and {url_of(entry)} both report node {node}")
            elif node is not None:
                found[node] = url_of(entry)
        self._found = found
        missing = len(self._names) < len(set(entries))
        self._retry_at = self._clock.monotonic() + RETRY_SECONDS if missing else float("inf")
        return problems

    def _log_new(self, problems: list[str]) -> None:
        """Logs each problem once while it lasts."""
        for problem in problems:
            if problem not in self._logged:
                logger.warning("%s", problem)
        self._logged = set(problems)
