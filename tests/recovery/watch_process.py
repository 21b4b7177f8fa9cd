"""A real watch process for tests: python -m tests.recovery.watch_process DATABASE_URL DIAGNOSES_FILE LEASE_SECONDS

Its detector says what stands in the file (JSON, a list), and takes the runtime's word for progress.
"""

import json
import logging
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rolecall.core.clock import SystemClock
from rolecall.core.config.job import RecoveryConfig
from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.core.ids import ReplicaId
from rolecall.core.journal.journal import Journal
from rolecall.core.membership import ReplicaState
from rolecall.recovery.actuators.ray_runtime import RayRuntime
from rolecall.recovery.loop import Watch, holder_name
from rolecall.recovery.notifications.delivery import LogNotifier
from rolecall.testing.recovery_world import FakeObservation

POLL_SECONDS = 0.05


class PollingSource:
    def poll(self, timeout_seconds: float) -> FakeObservation:
        clock = SystemClock()
        clock.sleep(timeout_seconds)
        return FakeObservation(wall_at=clock.wall())


class FileDetector:
    def __init__(self, path: Path, journal: Journal) -> None:
        self._path, self._journal = path, journal

    def observe(self, observation: Any) -> list[Diagnosis]:
        del observation
        return [Diagnosis.from_dict(d) for d in json.loads(self._path.read_text())]

    def ended(self, replica: str, node: str) -> bool:
        return False

    def progressing(self, replica: str, incarnation_min: int) -> tuple[bool, str]:
        actual = self._journal.current()[ReplicaId(replica)]
        moves = actual.state is ReplicaState.SERVING and actual.incarnation >= incarnation_min
        return moves, f"{replica}#{actual.incarnation} is {actual.state}"

    def forget(self, replica: str, below_incarnation: int) -> None:
        del replica, below_incarnation

    def unforget(self, replica: str, incarnation: int) -> None:
        del replica, incarnation

    def window(self, suspects: Iterable[Suspect] = ()) -> Mapping[str, Any]:
        return {}


def main(url: str, diagnoses: str, lease_seconds: str) -> None:
    logging.basicConfig(level=logging.INFO)
    journal = Journal(url, create=False)
    config = RecoveryConfig(mode="act", lease_seconds=float(lease_seconds))
    detector = FileDetector(Path(diagnoses), journal)
    watch = Watch(
        journal,
        PollingSource(),
        detector,
        RayRuntime(journal),
        config,
        LogNotifier(),
        SystemClock(),
        holder_name(),
        poll_seconds=POLL_SECONDS,
    )
    watch.run(threading.Event())


if __name__ == "__main__":
    main(*sys.argv[1:])
