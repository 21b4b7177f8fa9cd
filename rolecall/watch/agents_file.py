"""The file of `watch agents FILE`: which agents there are, looked at again whenever it changes.

Two forms. A name ending in `.json`, `.yaml` or `.yml`: groups as Prometheus reads them (`file_sd_configs`), so that one
file serves both; of the labels `__scheme__` alone counts (`https`):

    - targets: [gpu-001:9477, gpu-002:9477]
      labels: {__scheme__: https}

Any other name: one `http[s]://HOST:PORT` or `NODE=http[s]://HOST:PORT` a line, `#` begins a comment.

A file that is damaged or gone changes nothing: what was read last stands, and why is logged once. An agent that does not
say which node it is of is left out, logged once, and asked again. Who leaves the file is no longer watched.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rolecall.core.clock import Clock
from rolecall.core.config.job import read_yaml
from rolecall.core.errors import ConfigError
from rolecall.watch.agents import asked_names, checked_entries, url_of

logger = logging.getLogger(__name__)

RETRY_SECONDS = 10.0
"""How often agents are asked that did not answer; each costs a connection."""
FILE_BYTES_MAX = 4 << 20
GROUPS = (".json", ".yaml", ".yml")
SCHEME_LABEL = "__scheme__"


def entries_of(path: Path) -> list[str]:
    """What the file names.

    Raises:
        ConfigError: it cannot be read, or names what is no agent: every problem.
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
    """Raises ValueError: these are no groups."""
    if not isinstance(value, list):
        raise ValueError("expected a list of groups with targets, as Prometheus' file_sd_configs takes them")  # noqa: TRY004
    found = []
    for n, group in enumerate(value):
        targets = group.get("targets") if isinstance(group, dict) else None
        labels = (group.get("labels") or {}) if isinstance(group, dict) else {}
        if not isinstance(targets, list) or not isinstance(labels, dict):
            raise ValueError(f"group {n}: expected targets, a list, and perhaps labels, a mapping")  # noqa: TRY004
        found += [f"{labels.get(SCHEME_LABEL, 'http')}://{target}" for target in targets]
    return found


class AgentsFile:
    """`ask`: the node of an agent, by its address; may raise as `agents_watching.node_of`. `keep`: is told the agents
    whenever they are others than before. Both are called in a thread of its own, so that `urls` waits for nobody."""

    def __init__(
        self, path: Path, ask: Callable[[str], str], keep: Callable[[Mapping[str, str]], None], clock: Clock
    ) -> None:
        self._path, self._ask, self._keep, self._clock = path, ask, keep, clock
        self._names: dict[str, str] = {}  # entry -> node
        self._found: dict[str, str] = {}  # node -> URL; replaced, never changed
        self._read_state: tuple[int, int, int] | None = None
        self._retry_at = float("inf")
        self._said: set[str] = set()
        self._thread: threading.Thread | None = None

    def first(self) -> dict[str, str]:
        """The agents as they are now: node -> URL. Waits for their answers.

        Raises:
            ConfigError: the file is none, or not one of its agents says which node it is of.
        """
        self._read_state = self._state()
        problems = self._resolve(entries_of(self._path))
        if not self._found:
            raise ConfigError(problems)
        self._say(problems)
        return self._found

    def urls(self) -> Mapping[str, str]:
        """node -> URL, as of the newest reading; begins another where the file has changed, or one did not answer."""
        if self._thread is None or not self._thread.is_alive():
            state = self._state()
            if state != self._read_state or self._clock.monotonic() >= self._retry_at:
                self._read_state = state
                self._thread = threading.Thread(target=self._again, name="agents-file", daemon=True)
                self._thread.start()
        return self._found

    def _state(self) -> tuple[int, int, int] | None:
        """What differs once the file was written or replaced; None: it is not there."""
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _again(self) -> None:
        before = self._found
        try:
            self._say(self._resolve(entries_of(self._path)))
            if self._found != before:
                logger.info("%s: %d agents, were %d", self._path, len(self._found), len(before))
                self._keep(self._found)
        except ConfigError as e:
            self._retry_at = float("inf")  # the next change of the file is looked at
            self._say(list(e.problems))
        except OSError as e:  # of `keep`: what is watched is right all the same
            self._say([f"agents: {self._path}: {e}"])

    def _resolve(self, entries: list[str]) -> list[str]:
        """Takes these as the agents; returns why some are not among them."""
        names, problems = asked_names([e for e in entries if e not in self._names], self._ask)
        self._names = {e: n for e, n in {**self._names, **names}.items() if e in entries}
        found: dict[str, str] = {}
        for entry in entries:
            node = self._names.get(entry)
            if node in found:
                problems.append(f"agents: {found[node]} and {url_of(entry)} both speak for {node}")
            elif node is not None:
                found[node] = url_of(entry)
        self._found = found
        missing = len(self._names) < len(set(entries))
        self._retry_at = self._clock.monotonic() + RETRY_SECONDS if missing else float("inf")
        return problems

    def _say(self, problems: list[str]) -> None:
        """Each once, for as long as it is one."""
        for problem in problems:
            if problem not in self._said:
                logger.warning("%s", problem)
        self._said = set(problems)
