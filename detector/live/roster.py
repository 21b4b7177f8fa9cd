"""Index of the currently monitored processes by key, role and replica.

A watcher of a thousand nodes has sixteen thousand processes and several polls per second: a lookup per sample or per
poll must not scan all of them (docs/decisions/0021).
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from rolecall.detector.live.subject import Key, MonitoredProcess

NOBODY: Mapping[Key, MonitoredProcess] = MappingProxyType({})


class ProcessIndex:
    """The subjects that are not closed, in insertion order. `changes` increases whenever one is added, removed or
    exits; values derived from an older count are stale."""

    def __init__(self) -> None:
        self.changes = 0
        self._all: dict[Key, MonitoredProcess] = {}
        self._by_role: dict[str, dict[Key, MonitoredProcess]] = {}
        self._by_replica: dict[str, dict[Key, MonitoredProcess]] = {}
        self._gone: dict[Key, MonitoredProcess] = {}
        self._sizes: dict[str, int] = {}
        self._sizes_of = -1

    def __iter__(self) -> Iterator[MonitoredProcess]:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def add(self, subject: MonitoredProcess) -> None:
        """Replaces an existing process with the same key."""
        before = self._all.get(subject.key)
        if before is not None:
            self.remove(before)
        self._all[subject.key] = subject
        self._by_role.setdefault(subject.role, {})[subject.key] = subject
        self._by_replica.setdefault(subject.replica, {})[subject.key] = subject
        if subject.gone:
            self._gone[subject.key] = subject
        self.changes += 1

    def remove(self, subject: MonitoredProcess) -> None:
        """No effect if it is not in the index."""
        if self._all.get(subject.key) is not subject:
            return
        del self._all[subject.key]
        self._gone.pop(subject.key, None)
        for index, name in ((self._by_role, subject.role), (self._by_replica, subject.replica)):
            del index[name][subject.key]
            if not index[name]:
                del index[name]
        self.changes += 1

    def note_gone(self, subject: MonitoredProcess) -> None:
        """Records that its process has exited."""
        if self._all.get(subject.key) is subject:
            self._gone[subject.key] = subject
            self.changes += 1

    def of_role(self, role: str) -> Mapping[Key, MonitoredProcess]:
        return self._by_role.get(role, NOBODY)

    def of_replica(self, replica: str) -> Mapping[Key, MonitoredProcess]:
        return self._by_replica.get(replica, NOBODY)

    @property
    def gone(self) -> Mapping[Key, MonitoredProcess]:
        """Subjects whose process has exited, in order of detection."""
        return self._gone

    def sizes(self) -> Mapping[str, int]:
        """Number of replicas with a live process, per role."""
        if self._sizes_of != self.changes:
            replicas: dict[str, set[str]] = {}
            for s in self:
                if not s.gone:
                    replicas.setdefault(s.role, set()).add(s.replica)
            self._sizes = {role: len(names) for role, names in replicas.items()}
            self._sizes_of = self.changes
        return self._sizes
