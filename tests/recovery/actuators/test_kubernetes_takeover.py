"""Plans that a watch performs through the API of Kubernetes: what its journal has, and what the next watch makes of it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rolecall.core.clock import FakeClock
from rolecall.core.diagnosis import ActionKind, Plan, PlanTarget
from rolecall.core.ids import IncidentId, NodeId, ReplicaId
from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from rolecall.core.journal.payloads.recovery import CallEnded, CallStarted
from rolecall.core.membership import Desired
from rolecall.recovery.actuators.base import ActionResult
from rolecall.recovery.actuators.external import ExternalActuator
from rolecall.recovery.actuators.targets import kubernetes as module
from rolecall.recovery.actuators.targets.kubernetes import Kubernetes
from rolecall.recovery.actuators.targets.target import Order
from tests.recovery.actuators.driving import TOO_LATE, drive, member, order
from tests.recovery.actuators.kubernetes_fake import FakeKubernetes, served
from tests.recovery.actuators.test_kubernetes import group, kuberay, kubernetes, listed, worker
from tests.support import PATIENCE_SECONDS, eventually

A = ActionKind


@pytest.fixture
def fake() -> FakeKubernetes:
    """Three rollouts, each a pod of a StatefulSet on a node of its own."""
    it = FakeKubernetes()
    for n in range(3):
        it.pod(f"rollout-{n}", f"node-{n}", labels={"app": "rollout"})
    return it


@pytest.fixture
def ray() -> FakeKubernetes:
    it = FakeKubernetes()
    it.cluster("ray", group("gpu"))
    for n in range(3):
        worker(it, f"w-{n}", f"node-{n}")
    return it


class Watch:
    """A journal with the lease of a watch, and plans for rollout/1 that are performed over HTTP."""

    def __init__(self, folder: Path, target: Kubernetes) -> None:
        self.clock, self.target = FakeClock(), target
        self.journal = Journal(f"sqlite:///{folder / 'journal.db'}", clock=self.clock)
        self.journal.set_desired(Desired(replica=ReplicaId("rollout/1"), incarnation=2, node=NodeId("rollout-1")))
        self.members = [(2, member("rollout/1", "rollout-1"))]

    def perform(self, until: Callable[[], object] = lambda: False) -> ActionResult | None:
        """By a watch that has just started, and which dies after `until`."""
        aim = PlanTarget(replica=ReplicaId("rollout/1"), incarnation=2, node=NodeId("rollout-1"))
        plan = Plan(incident_id=IncidentId("inc-1-x"), action=A.REPLACE_NODE, targets=(aim,), because="it hangs")
        lease = self.journal.acquire("watch", "me", 60.0)
        assert lease is not None
        actuator = ExternalActuator(
            self.target, self.journal, lambda: self.members, self.clock, deadline_seconds=PATIENCE_SECONDS
        )
        results: list[ActionResult | None] = []
        try:
            eventually(
                lambda: results.append(actuator.perform(plan, lease)) or results[-1] or until(), "it has a result"
            )
        finally:
            actuator.close()
        return results[-1]

    def done(self) -> str:
        result = self.perform()
        assert result is not None and result.done, result
        return result.because

    def refused(self) -> str:
        result = self.perform()
        assert result is not None and not result.done, result
        return result.because

    def calls(self) -> list[tuple[str, int]]:
        """(method and path, status) of the changing calls; -2: no reply is recorded."""
        started = self.journal.events(kinds=[EventKind.CALL_STARTED])
        replies = {
            (e.key or "").replace(":reply:", ":call:"): e.as_(CallEnded).status
            for e in self.journal.events(kinds=[EventKind.CALL_ENDED])
        }
        return [(e.as_(CallStarted).words, replies.get(e.key or "", -2)) for e in started]


@pytest.fixture
def watch(fake: FakeKubernetes, tmp_path: Path) -> Iterator[Watch]:
    token = tmp_path / "token"
    token.write_text("secret")
    with served(fake, "secret") as url:
        it = Watch(tmp_path, kubernetes(pod="{node}", api=url, token_path=str(token)))
        yield it
        it.journal.close()


def test_the_journal_has_each_call_and_its_reply(fake: FakeKubernetes, watch: Watch) -> None:
    uid = fake.uid("rollout-1")
    assert watch.done() == "evicted rollout-1; node node-1 is cordoned"
    assert watch.calls() == [("cordon node node-1", 200), ("evict pod rollout-1", 201)] and fake.ended == [uid]


def test_the_journal_has_what_was_refused(fake: FakeKubernetes, watch: Watch) -> None:
    fake.forbidden = {"nodes"}
    assert watch.refused() == "read node node-1: status 403: forbidden" and not watch.calls()
    fake.forbidden = {"pods/eviction"}
    assert "pod rollout-1 was not evicted: status 403: forbidden; node node-1" in watch.refused()
    assert watch.calls() == [("cordon node node-1", 200), ("evict pod rollout-1", 403)] and not fake.ended


# --- a watch that takes over --------------------------------------------------------------------------------------


def test_a_watch_that_takes_over_evicts_no_second_pod(fake: FakeKubernetes, watch: Watch) -> None:
    """The first one died before it wrote how its action ended."""
    uid = fake.uid("rollout-1")
    assert watch.done() and fake.ended == [uid]
    assert "it started after it" in watch.done() and fake.ended == [uid]  # its processes are not known to have ended
    watch.members = []
    assert watch.done() == "rollout/1#2 has ended" and fake.ended == [uid]


@pytest.mark.parametrize("seen", ["none", "later"])
def test_a_container_that_started_again_on_a_cordoned_node_was_not_replaced(
    fake: FakeKubernetes, watch: Watch, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first watch died while a disruption budget refused the eviction."""
    monkeypatch.setattr(module, "BUDGET_SECONDS", 0.1)
    fake.budget = 1_000_000
    assert watch.perform(until=lambda: watch.calls()[-1:] == [("evict pod rollout-1", 429)]) is None
    watch.members = []
    if seen == "later":
        watch.journal.set_desired(Desired(replica=ReplicaId("rollout/1"), incarnation=3, node=NodeId("rollout-1")))
    because = watch.refused()
    assert ("rollout/1#3 runs by now" if seen == "later" else "nothing to evict") in because and not fake.ended
    assert because.endswith("; calls made before: cordon node node-1")


def in_two_pods(**more: Any) -> Order:
    """The agents run in the pods; the fault is that of the first one's node."""
    return order(member("rollout/1", "rollout-1"), member("rollout/1", "rollout-2", rank=1), **more)


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize("config", [{"pod": "{node}"}, {"selector": "app=rollout"}])
def test_the_pods_that_an_earlier_watch_has_not_evicted_are_evicted(
    fake: FakeKubernetes, config: dict[str, str], gone: bool
) -> None:
    """Its agent has ended with the pod, so that nobody has seen the processes in it end."""
    uid = fake.uid("rollout-2")
    if gone:
        del fake.pods["rollout-1"]
    else:
        fake.replace_pod("rollout-1")
    given = in_two_pods(begun=True, leave_node=True)
    it = drive(kubernetes(**config).replace(given), fake.reply)
    assert it.done == "evicted rollout-2; its node was cordoned before" and fake.ended == [uid]
    it = drive(kubernetes(**config).replace(given), fake.reply)
    assert it.done.startswith("rollout/1#2 has ended: ") and fake.ended == [uid]


def test_a_pod_that_is_gone_before_any_was_evicted_stops_the_action(fake: FakeKubernetes) -> None:
    del fake.pods["rollout-1"]
    it = drive(kubernetes(pod="{node}").replace(in_two_pods()), fake.reply)
    assert it.error == "there is no pod rollout-1 in rl" and not it.changing


def test_the_workers_that_an_earlier_watch_has_not_deleted_are_deleted(ray: FakeKubernetes) -> None:
    """Its patch did not arrive for all it knew, or KubeRay is not through with it."""
    uid = ray.uid("w-2")
    ray.replace_pod("w-1")
    ranks = member("rollout/1", "node-1"), member("rollout/1", "node-2", rank=1)
    it = drive(kuberay().replace(order(*ranks, begun=True)), ray.reply)
    assert it.done == "RayCluster ray deleted w-2" and ray.ended == [uid]
    assert listed(ray) == [{"workersToDelete": []}]


def test_a_cordon_has_ended_nothing(fake: FakeKubernetes) -> None:
    it = drive(kubernetes(pod="{node}").replace(in_two_pods(leave_node=True)), fake.reply)
    assert [c.prepares for c in it.calls if c.changes] == [True, False, False]


# --- a plan that is given up --------------------------------------------------------------------------------------


def test_what_was_done_before_the_deadline_is_told(fake: FakeKubernetes) -> None:
    target, given = kubernetes(pod="{node}"), in_two_pods(leave_node=True)
    it = drive(target.replace(given), fake.reply, give_up=f"evict-{fake.uid('rollout-2')}")
    assert it.error == f"{TOO_LATE}; node node-1 is cordoned; evicted before: rollout-1"
    fake.pod("rollout-1", "node-1")
    it = drive(target.replace(given), fake.reply, give_up="gone")
    assert it.error == f"{TOO_LATE}; node node-1 is cordoned; evicted before: rollout-1, rollout-2"


def test_what_a_person_must_clear_is_told(ray: FakeKubernetes) -> None:
    given = order(member("rollout/1", "node-1"), leave_node=True)
    it = drive(kuberay().replace(given), ray.reply, give_up="gone")
    by_hand = "empty scaleStrategy.workersToDelete of group gpu in RayCluster ray by hand"
    assert it.error.startswith(TOO_LATE) and it.error.endswith(f"; {by_hand}; node node-1 is cordoned")


def test_what_nvsentinel_may_still_do_is_told(fake: FakeKubernetes) -> None:
    fake.nvsentinel = "blocked"
    target = kubernetes(selector="app=rollout", cordon_by="nvsentinel")
    it = drive(target.replace(order(member("rollout/1", "node-1"), leave_node=True)), fake.reply, give_up="cordoned")
    assert it.error.startswith(f"{TOO_LATE}; NVSentinel may still cordon node node-1: delete MaintenanceRequest")
