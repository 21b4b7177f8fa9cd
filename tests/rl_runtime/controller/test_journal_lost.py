"""A run whose journal is lost: everything ends, however it was started."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from rolecall.core.errors import JournalUnavailable
from rolecall.core.membership import ReplicaState
from tests.rl_runtime.cluster.test_supervisor import Rig
from tests.support import PATIENCE_SECONDS


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    try:
        yield made
    finally:
        made.actors.end()


def _lose(rig: Rig, tmp_path: Path) -> None:
    """From now on the database cannot be opened any more."""
    rig.journal.store.engine.dispose()
    rig.journal.store.engine = sa.create_engine(f"sqlite:///{tmp_path / 'nowhere' / 'journal.db'}")


def test_stopping_ends_every_process_without_the_journal(
    rig: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig.want("reward/0")
    rig.until("reward/0", 1, ReplicaState.READY)
    (process,) = rig.actors.processes.values()
    assert process.poll() is None
    _lose(rig, tmp_path)
    with pytest.raises(JournalUnavailable):
        rig.supervisor.tick()
    rig.supervisor.stop("its journal is away")
    assert process.wait(PATIENCE_SECONDS) in (-signal.SIGTERM, -signal.SIGKILL), "it carries the run's marker"
    assert "ending everything without its records" in caplog.text
