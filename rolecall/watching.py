"""`rolecall watch`, put together: the agents as source, the detectors, recovery's loop, the actuator of the runtime.

The default detector of panels looks at the metrics of the run's own processes, too, and the engine is told what it says.

What the detectors have learned is kept beside the journal every few seconds, so that a restarted watch knows the
deadlines and rates of this run and does not begin to learn in the middle of a fault.
"""

import json
import logging
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.config import JobConfig, parse_job
from rolecall.core.diagnosis import Diagnosis, Finding
from rolecall.core.errors import RunNotFound
from rolecall.core.journal import Journal
from rolecall.core.rows import reading
from rolecall.core.rundir import RunDir, write_atomically
from rolecall.detector.engine import Detector
from rolecall.detector.fusion import on_panels_alone
from rolecall.detector.observation import Observation
from rolecall.detector.registry import detector as panel_detector
from rolecall.detector.run_panels import RunPanels
from rolecall.detector.source import AgentsSource
from rolecall.recovery import commands
from rolecall.recovery.actuators.nothing import Nothing
from rolecall.recovery.actuators.ray_runtime import RayRuntime
from rolecall.recovery.book import Book
from rolecall.recovery.interfaces import Notifier
from rolecall.recovery.notify import LogNotifier, WebhookNotifier
from rolecall.recovery.watch import Watch, holder_name
from rolecall.text import plain

logger = logging.getLogger(__name__)

KEEP_SECONDS = 10.0
"""What was learned is written this often."""
CLOSE_SECONDS = 5.0
LEARNED_FILE = "detector.json"


def agent_urls(run: RunDir) -> dict[str, str]:
    """node -> URL of its agent, as the agents wrote them; one that is just restarting is missing."""
    found: dict[str, str] = {}
    for path in (run.path / "nodes").glob("*/agent.json"):
        try:
            value = json.loads(path.read_text())
            found[str(value["node"])] = str(value["url"])
        except (OSError, ValueError, KeyError):
            continue  # being replaced, or half a node: the source notices that this agent does not answer
    return found


class _Remembering:
    """Detectors, and on disk what the engine has learned, so that the next watch can take it up. Panels begin anew."""

    def __init__(self, run: RunDir, job: JobConfig, clock: Clock, roles: Mapping[str, int] | None = None) -> None:
        """`roles`: how many replicas are meant to be; None: as the job file says."""
        roles = job.roles.counts() if roles is None else roles
        self._path, self._clock, self._kept_at = run.path / LEARNED_FILE, clock, clock.monotonic()
        self._panels = RunPanels(panel_detector())
        self._detector = Detector(job.detector, roles)
        try:
            state = json.loads(self._path.read_text())
            self._detector = Detector.resumed(job.detector, roles, state)
        except FileNotFoundError:
            pass  # the first watch of this run
        except (ValueError, KeyError, TypeError) as e:
            logger.warning("%s is damaged (%s): learning from nothing", self._path, e)

    def observe(self, observation: Observation) -> Sequence[Diagnosis]:
        standing = self._detector.observe(replace(observation, panel_findings=self._of_panels(observation)))
        now = self._clock.monotonic()
        if now - self._kept_at >= KEEP_SECONDS and all(map(on_panels_alone, standing)):
            self._kept_at = now
            write_atomically(self._path, json.dumps(self._detector.state()))
        return standing

    def _of_panels(self, observation: Observation) -> tuple[Finding, ...]:
        try:
            return self._panels.findings(observation)
        except Exception:
            # Deliberate: the engine finds what ends a run, and must not go blind for want of the weakest evidence.
            logger.exception("panels begin anew")
            self._panels = RunPanels(panel_detector())
            return ()

    def progressing(self, replica: str, incarnation_min: int) -> tuple[bool, str]:
        return self._detector.progressing(replica, incarnation_min)

    def forget(self, replica: str, below_incarnation: int) -> None:
        self._detector.forget(replica, below_incarnation)

    def window(self) -> dict[str, Any]:
        return self._detector.window()


def watch_run(run: RunDir, seconds: float | None = None, authorization: str = "") -> int:
    """Watches until the run is over, `seconds` are, or SIGTERM. Returns the exit code. `authorization`: value of that
    header, for agents that want a user.

    A run with `agents` in run.json is somebody else's job (agents_watching.py): it is only observed, nothing says when it
    is over, and exit code 1 says that incidents were opened.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    stop = threading.Event()

    def handle(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    if seconds is not None:
        timer = threading.Timer(seconds, stop.set)
        timer.daemon = True
        timer.start()
    return watch_until(run, stop, authorization)


def watch_until(run: RunDir, stop: threading.Event, authorization: str = "") -> int:
    """`watch_run` without signals and logging: until `stop` is set."""
    clock = SystemClock()
    value = run.read()
    if not isinstance(value.get("config"), dict):
        raise RunNotFound(f"{run.path / 'run.json'}: damaged: it holds no config")
    job = parse_job(value["config"], str(run.path / "run.json"))
    agents = value.get("agents")
    ours = agents is None
    if not isinstance(agents, dict | None):
        raise RunNotFound(f"{run.path / 'run.json'}: damaged: agents is no mapping")
    journal = Journal(run.database_url, create=False)
    known = _num_incidents(journal)
    source = AgentsSource(
        lambda: agents or agent_urls(run), clock, job.detector.poll_seconds, authorization=authorization
    )
    notifier = _notifier(run, job, clock)
    source.start()
    try:
        Watch(
            journal,
            source,
            _Remembering(run, job, clock, None if ours else {}),
            RayRuntime(journal) if ours else Nothing(),
            job.recovery,
            notifier,
            clock,
            holder_name(),
            run_id=run.run_id,
            poll_seconds=job.detector.poll_seconds,
        ).run(stop)
        return 0 if ours or _num_incidents(journal) == known else 1
    finally:
        source.close()
        notifier.close(CLOSE_SECONDS)
        journal.close()


def _num_incidents(journal: Journal) -> int:
    book = Book()
    book.refresh(journal)
    return len(book.incidents)


def _notifier(run: RunDir, job: JobConfig, clock: Clock) -> Notifier:
    url = job.recovery.webhook_url
    if url is None:
        return LogNotifier()
    return WebhookNotifier(url, run_id=run.run_id, deadman_seconds=job.recovery.deadman_seconds, clock=clock)


def replay_incident(run: RunDir, incident: str) -> dict[str, Any]:
    """Decides an incident again: diagnosis from the stored window, plan from the question stored with it.

    Returns `same`, the parts, and `text` for people.
    """
    value: dict[str, Any] = commands.replay(run, incident)
    journal = Journal(run.database_url, create=False)
    try:
        where, window = journal.store.where, journal.windows(incident).get("observations")
    finally:
        journal.close()
    if window is None:
        return value
    with reading(where, f"window of {incident}"):
        opened = Diagnosis.from_dict(value["diagnosis"])
        standing = {d.key: d for looked in Detector.replay_window(window) for d in looked}
    again = standing.get(opened.key)
    value["diagnosed_again"] = again is not None
    value["same"] = bool(value["same"]) and again is not None
    verdict = f"diagnosed again: {again.because}" if again else "the stored window does not give this diagnosis again"
    value["text"] = f"{value['text']}\n{plain(verdict)}"
    return value
