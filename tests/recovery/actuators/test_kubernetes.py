"""Evictions through the API of Kubernetes: of the pods that hold the named incarnation, and of no others."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolecall.core.config.actuators import KubeRayActuator, KubernetesActuator
from rolecall.core.config.watched import parse_watched
from rolecall.core.diagnosis import ActionKind
from rolecall.core.errors import ConfigError
from rolecall.recovery.actuators.calls import NO_STATUS, Call, HttpCall, Reply
from rolecall.recovery.actuators.external import calls_of
from rolecall.recovery.actuators.targets.choice import target_of
from rolecall.recovery.actuators.targets.kuberay import REPLICA_LABEL, KubeRay
from rolecall.recovery.actuators.targets.kubernetes import Kubernetes
from rolecall.recovery.actuators.targets.kubernetes_api import TRIES_MAX
from rolecall.recovery.actuators.targets.target import Order
from tests.recovery.actuators.driving import NOW, Driven, drive, member, order
from tests.recovery.actuators.kubernetes_fake import NAMESPACE, FakeKubernetes, served

ROLE = Path(__file__).parents[3] / "deploy" / "kubernetes" / "watch-rbac.yaml"
NVSENTINEL_ROLE = ROLE.with_name("watch-rbac-nvsentinel.yaml")
A = ActionKind


def kubernetes(**config: object) -> Kubernetes:
    return Kubernetes(KubernetesActuator.model_validate({"kind": "kubernetes", "namespace": NAMESPACE, **config}))


def kuberay(**config: object) -> KubeRay:
    return KubeRay(
        KubeRayActuator.model_validate({"kind": "kuberay", "namespace": NAMESPACE, "cluster": "ray", **config})
    )


@pytest.fixture
def fake() -> FakeKubernetes:
    """Three rollouts, each a pod of a StatefulSet on a node of its own."""
    it = FakeKubernetes()
    for n in range(3):
        it.pod(f"rollout-{n}", f"node-{n}", labels={"app": "rollout", "replica": str(n)})
    return it


# --- Kubernetes ---------------------------------------------------------------------------------------------------


def in_pod(n: int = 1, **more: Any) -> Order:
    """The agents run in the pods."""
    others = tuple(member(f"rollout/{i}", f"rollout-{i}") for i in range(3) if i != n)
    return order(member(f"rollout/{n}", f"rollout-{n}"), others=others, **more)


def on_node(n: int = 1, **more: Any) -> Order:
    """An agent runs on each node."""
    return order(member(f"rollout/{n}", f"node-{n}"), **more)


def test_the_pod_is_evicted_by_its_uid(fake: FakeKubernetes) -> None:
    uid = fake.uid("rollout-1")
    it = drive(kubernetes(pod="{node}").replace(in_pod()), fake.reply)
    assert it.done == "evicted rollout-1" and fake.ended == [uid] and fake.cordoned == []
    (call,) = [c for c in it.calls if c.changes]
    assert isinstance(call, HttpCall) and call.repeatable
    assert call.url == f"https://kubernetes.default.svc/api/v1/namespaces/{NAMESPACE}/pods/rollout-1/eviction"
    assert call.body["deleteOptions"] == {"preconditions": {"uid": uid}}
    assert call.token_path.endswith("/token") and call.ca_path.endswith("/ca.crt")


@pytest.mark.parametrize("selector", ["app=rollout,replica={index}", "app={role}"])
def test_the_pod_is_found_by_its_labels_and_node(fake: FakeKubernetes, selector: str) -> None:
    uid = fake.uid("rollout-1")
    assert drive(kubernetes(selector=selector).replace(on_node()), fake.reply).done == "evicted rollout-1"
    assert fake.ended == [uid]


def test_a_replica_of_several_pods_loses_all_of_them(fake: FakeKubernetes) -> None:
    given = order(member("rollout/1", "rollout-1"), member("rollout/1", "rollout-2", rank=1))
    uids = [fake.uid("rollout-1"), fake.uid("rollout-2")]
    assert drive(kubernetes(pod="{node}").replace(given), fake.reply).done == "evicted rollout-1, rollout-2"
    assert fake.ended == uids


def test_the_node_that_must_be_left_is_cordoned_first_and_once(fake: FakeKubernetes) -> None:
    target = kubernetes(pod="{node}")
    it = drive(target.replace(in_pod(leave_node=True)), fake.reply)
    assert it.done == "evicted rollout-1; node node-1 is cordoned" and fake.cordoned == ["node-1"]
    assert "PATCH" in it.changing[0] and "eviction" in it.changing[1]
    assert "inc-1-x" in fake.nodes["node-1"]["metadata"]["annotations"]["rolecall/cordoned-because"]
    fake.pod("rollout-1", "node-1")
    assert drive(target.replace(in_pod(leave_node=True)), fake.reply).done and fake.cordoned == ["node-1"]


def test_without_permission_to_cordon_such_faults_are_not_supported() -> None:
    assert kubernetes(pod="{node}").supports == {A.REPLACE_REPLICA, A.REPLACE_NODE}
    assert kubernetes(pod="{node}", cordon=False).supports == kuberay(cordon=False).supports == {A.REPLACE_REPLICA}


def test_a_pod_that_has_got_the_name_meanwhile_is_left_alone(fake: FakeKubernetes) -> None:
    fake.replace_pod("rollout-1")
    it = drive(kubernetes(pod="{node}").replace(in_pod(leave_node=True)), fake.reply)
    assert "does not hold rank 0 of rollout/1#2 on rollout-1: it started after it" in it.error
    assert not it.changing and not fake.ended and not fake.cordoned


def test_a_pod_that_is_replaced_between_reading_and_evicting_is_left_alone(fake: FakeKubernetes) -> None:
    def answer(call: Call) -> Reply:
        if call.key.startswith("evict") and not replaced:
            replaced.append(1)
            fake.replace_pod("rollout-1")
        return fake.reply(call)

    replaced: list[int] = []
    assert drive(kubernetes(pod="{node}").replace(in_pod()), answer).done and not fake.ended


def test_a_container_that_has_started_again_does_not_hold_the_process(fake: FakeKubernetes) -> None:
    fake.pod("rollout-1", "node-1", started_at=NOW + 5)
    assert "started after it" in drive(kubernetes(pod="{node}").replace(in_pod()), fake.reply).error
    # The sidecar is older than the process, and says nothing about it.
    fake.pod("rollout-1", "node-1", started_at=NOW + 1)  # clocks may differ
    assert drive(kubernetes(pod="{node}").replace(in_pod()), fake.reply).done


@pytest.mark.parametrize(
    ("owner", "leave_node", "error"),
    [("", False, "no controller"), ("DaemonSet", True, "start it on the same node"), ("DaemonSet", False, "")],
)
def test_a_pod_that_nothing_would_start_elsewhere_stays(
    fake: FakeKubernetes, owner: str, leave_node: bool, error: str
) -> None:
    fake.pod("rollout-1", "node-1", owner=owner)
    it = drive(kubernetes(pod="{node}").replace(in_pod(leave_node=leave_node)), fake.reply)
    assert error in it.error and bool(it.changing) == (not error), it


def test_two_pods_that_may_hold_the_process_both_stay(fake: FakeKubernetes) -> None:
    fake.pod("rollout-9", "node-1", labels={"app": "rollout"})
    it = drive(kubernetes(selector="app=rollout").replace(on_node()), fake.reply)
    assert "cannot tell which pod holds" in it.error and "rollout-1, rollout-9" in it.error and not it.changing


def test_processes_that_no_pod_holds_stay(fake: FakeKubernetes) -> None:
    for target, given in (
        (kubernetes(pod="rollout-{index}"), order(member("rollout/1", "elsewhere"))),
        (kubernetes(selector="app=other"), on_node()),
        (kubernetes(pod="{node}"), on_node()),
        (kubernetes(pod="{node}"), order(member("rollout/1", "rollout-1", at=0.0))),
        (kubernetes(pod="{node}"), order()),
    ):
        it = drive(target.replace(given), fake.reply)
        assert it.error and not it.changing, it


def test_after_a_takeover_an_ended_replica_is_done() -> None:
    assert drive(kubernetes(pod="{node}").replace(order(begun=True)), FakeKubernetes().reply).done


def test_a_disruption_budget_delays_an_eviction(fake: FakeKubernetes) -> None:
    fake.budget = 3
    it = drive(kubernetes(pod="{node}").replace(in_pod()), fake.reply)
    assert it.done and len(it.changing) == 4
    assert [c.after_seconds for c in it.calls if c.changes] == [0.0, 5.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("reply", "tries"),
    [
        (Reply(status=403, text='{"message": "pods is forbidden"}'), 1),
        (Reply(status=500, text="oops"), 4),
        (Reply(status=409, text="conflict"), 4),
        (Reply(status=410, text="Gone"), 1),
        (Reply(status=NO_STATUS, text="no whole answer within 10 s"), 4),
    ],
)
def test_a_refused_eviction_is_told_with_what_was_done_before(fake: FakeKubernetes, reply: Reply, tries: int) -> None:
    def answer(call: Call) -> Reply:
        return reply if call.key.startswith("evict") else fake.reply(call)

    it = drive(kubernetes(pod="{node}").replace(in_pod(leave_node=True)), answer)
    assert it.error.startswith("pod rollout-1 was not evicted: ") and "; node node-1 is cordoned" in it.error
    assert len([c for c in it.calls if c.key.startswith("evict")]) == tries
    assert "pods is forbidden" in it.error or reply.text in it.error


@pytest.mark.parametrize("code", [403, 404, 410])
def test_what_cannot_be_read_is_not_changed(fake: FakeKubernetes, code: int) -> None:
    for what in ("pod", "node"):
        it = drive(
            kubernetes(pod="{node}").replace(in_pod(leave_node=True)),
            lambda call, what=what: Reply(status=code) if call.key.startswith(what) else fake.reply(call),
        )
        assert it.error and not it.changing, it


def test_a_conflict_on_the_node_is_read_again(fake: FakeKubernetes) -> None:
    def answer(call: Call) -> Reply:
        if call.key == "cordon-0":
            fake.nodes["node-1"]["metadata"]["resourceVersion"] = "other"
        return fake.reply(call)

    it = drive(kubernetes(pod="{node}").replace(in_pod(leave_node=True)), answer)
    assert it.done and fake.cordoned == ["node-1"] and len(it.changing) == 3


def test_a_pod_that_is_known_by_the_cgroup_of_its_process_is_the_only_one(fake: FakeKubernetes) -> None:
    fake.pod("rollout-9", "node-1", labels={"app": "rollout"})
    uid = fake.uid("rollout-1")
    given = order(member("rollout/1", "node-1", pod_uid=uid, at=0.0))
    assert drive(kubernetes(selector="app=rollout").replace(given), fake.reply).done == "evicted rollout-1"
    it = drive(kubernetes(selector="app=rollout").replace(given), fake.reply)
    assert f"is in the pod with UID {uid}, and no pod" in it.error and fake.ended == [uid]


def test_replicas_in_other_pods_of_the_node_go_on() -> None:
    others = (
        member("rollout/2", "n-1", pod_uid="other"),
        member("rollout/3", "n-1", pod_uid="mine"),
        member("rollout/4", "n-1"),
    )
    given = order(member("rollout/1", "n-1", pod_uid="mine"), others=others)
    assert kubernetes(selector="app={role}").also_hit(given) == ["rollout/3", "rollout/4"]


def test_which_other_replicas_end_too() -> None:
    others = (member("rollout/2", "n-1"), member("reward/0", "n-1"), member("rollout/3", "n-2"))
    given = order(member("rollout/1", "n-1"), others=others)
    assert kubernetes(pod="{node}").also_hit(given) == ["reward/0", "rollout/2"]
    assert kubernetes(selector="app={role}").also_hit(given) == ["rollout/2"]
    assert kubernetes(selector="app={role},replica={index}").also_hit(given) == []
    assert kuberay().also_hit(given) == ["reward/0", "rollout/2"]


@pytest.mark.parametrize("target", [kubernetes(selector="app=rollout,replica={index}"), kuberay(selector="r={index}")])
def test_what_is_known_to_be_in_the_pod_ends_whatever_the_selector_says_of_it(target: Kubernetes | KubeRay) -> None:
    others = (member("reward/0", "n-1", pod_uid="mine"), member("rollout/2", "n-1", pod_uid="mine"))
    given = order(member("rollout/1", "n-1", pod_uid="mine"), others=others)
    assert target.also_hit(given) == ["reward/0", "rollout/2"]


@pytest.mark.parametrize("target", [kubernetes(selector="app=rollout,replica={index}"), kuberay(selector="r={index}")])
def test_a_selector_without_the_role_tells_nothing_of_other_roles(target: Kubernetes | KubeRay) -> None:
    others = (member("reward/0", "n-1"), member("rollout/2", "n-1"), member("reward/3", "n-2"))
    assert target.also_hit(order(member("rollout/1", "n-1"), others=others)) == ["reward/0"]


def test_processes_of_another_job_in_the_pod_are_told_apart() -> None:
    other = member("rollout/1", "n-1", pod_uid="mine")
    foreign = type(other)(**{name: getattr(other, name) for name in other.__slots__} | {"foreign": True})
    given = order(member("rollout/1", "n-1", pod_uid="mine"), others=(foreign,))
    assert kubernetes(selector="app=rollout").also_hit(given) == ["rollout/1 of another job"]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("pods", '{"items": [], "metadata": null}'),
        ("pods", '{"items": [], "metadata": [1]}'),
        ("node", '{"metadata": [], "spec": {}}'),
        ("node", '{"metadata": {"name": "node-1", "resourceVersion": "1"}, "spec": "x"}'),
        ("node", '{"metadata": {"name": "node-1"}}'),
    ],
)
def test_an_answer_of_another_form_changes_nothing(fake: FakeKubernetes, key: str, text: str) -> None:
    it = drive(
        kubernetes(selector="app=rollout").replace(on_node(leave_node=True)),
        lambda call: Reply(status=200, text=text) if call.key.startswith(key) else fake.reply(call),
    )
    assert it.error and not it.changing and not fake.ended


@pytest.fixture
def crowd() -> FakeKubernetes:
    """A RayCluster of 250 workers, each on a node of its own."""
    it = FakeKubernetes()
    it.cluster("ray", group(replicas=250))
    for n in range(250):
        worker(it, f"w-{n:03}", f"node-{n}")
    return it


def lists(it: Driven) -> list[HttpCall]:
    return [c for c in it.calls if isinstance(c, HttpCall) and "pods?" in c.url]


def test_the_pods_of_a_large_job_are_read_in_parts(crowd: FakeKubernetes) -> None:
    """All of them in one answer would be several MiB."""
    uids = [crowd.uid("w-249"), crowd.uid("w-001")]
    it = run_ray(crowd, on_node(249))
    assert it.done == "RayCluster ray deleted w-249" and len(lists(it)) == 3
    assert all("limit=100" in c.url for c in lists(it))
    it = drive(kubernetes(selector="ray.io/cluster=ray").replace(on_node(1)), crowd.reply)
    assert it.done == "evicted w-001" and crowd.ended == uids


def test_a_list_that_is_too_old_to_be_continued_is_read_again(crowd: FakeKubernetes) -> None:
    crowd.expired = 2
    it = run_ray(crowd, on_node(249))
    assert it.done == "RayCluster ray deleted w-249" and len(lists(it)) == 2 + 2 + 3
    crowd.expired = 1_000
    it = run_ray(crowd, on_node(1))
    assert "list the pods with ray.io/cluster=ray: status 410: The provided continue" in it.error and not it.changing
    assert len(lists(it)) == 2 * TRIES_MAX


# --- KubeRay ------------------------------------------------------------------------------------------------------


def group(name: str = "gpu", *, replicas: int = 3, hosts: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "groupName": name,
        "replicas": replicas,
        "minReplicas": 0,
        "maxReplicas": 8,
        "numOfHosts": hosts,
        "rayStartParams": {},
        "template": {
            "spec": {"containers": [{"name": "ray", "image": "ray:1", "env": [{"name": "SECRET", "value": "hunter2"}]}]}
        },
        **more,
    }


def worker(
    fake: FakeKubernetes, name: str, node: str, group_name: str = "gpu", kind: str = "worker", **more: str
) -> None:
    labels = {"ray.io/cluster": "ray", "ray.io/group": group_name, "ray.io/node-type": kind, **more}
    fake.pod(name, node, owner="RayCluster", labels=labels)


@pytest.fixture
def ray() -> FakeKubernetes:
    it = FakeKubernetes()
    it.cluster("ray", group("cpu"), group("gpu"))
    worker(it, "head", "node-9", "headgroup", "head")
    for n in range(3):
        worker(it, f"w-{n}", f"node-{n}")
    return it


def run_ray(fake: FakeKubernetes, given: Order | None = None, **config: Any) -> Driven:
    return drive(kuberay(**config).replace(on_node() if given is None else given), fake.reply)


def listed(fake: FakeKubernetes) -> list[Any]:
    return [g.get("scaleStrategy") for g in fake.clusters["ray"]["spec"]["workerGroupSpecs"]]


def test_kuberay_deletes_the_pod_and_makes_another_one(ray: FakeKubernetes) -> None:
    uid = ray.uid("w-1")
    it = run_ray(ray)
    assert it.done == "RayCluster ray deleted w-1" and ray.ended == [uid]
    assert listed(ray) == [None, {"workersToDelete": []}], "cleared"
    assert [g["replicas"] for g in ray.clusters["ray"]["spec"]["workerGroupSpecs"]] == [3, 3]
    assert len([p for p in ray.pods if p != "head"]) == 3
    assert "hunter2" not in "".join(it.changing), "the journal holds no environments of pods"


def test_kuberay_leaves_a_node_after_cordoning_it(ray: FakeKubernetes) -> None:
    it = run_ray(ray, on_node(leave_node=True))
    assert it.done == "RayCluster ray deleted w-1; node node-1 is cordoned" and ray.cordoned == ["node-1"]


def test_a_replica_of_several_hosts_is_deleted_whole() -> None:
    fake = FakeKubernetes()
    fake.cluster("ray", group(hosts=2))
    for n in range(4):
        worker(fake, f"w-{n}", f"node-{n}", **{REPLICA_LABEL: f"gpu-{n // 2}"})
    uids = [fake.uid("w-2"), fake.uid("w-3")]
    assert run_ray(fake, on_node(2)).done == "RayCluster ray deleted w-2, w-3" and fake.ended == uids


def test_a_replica_of_several_hosts_that_cannot_be_told_stays() -> None:
    fake = FakeKubernetes()
    fake.cluster("ray", group(hosts=2))
    worker(fake, "w-1", "node-1")
    assert "2 hosts in a replica" in run_ray(fake).error and not fake.ended
    worker(fake, "w-1", "node-1", **{REPLICA_LABEL: "gpu-0"})
    assert "2 hosts in a replica" in run_ray(fake).error and not fake.ended


def test_hosts_with_processes_that_the_plan_does_not_name_stay() -> None:
    fake = FakeKubernetes()
    fake.cluster("ray", group(hosts=2))
    for n in range(2):
        worker(fake, f"w-{n}", f"node-{n}", **{REPLICA_LABEL: "gpu-0"})
    given = order(member("rollout/1", "node-1"), others=(member("reward/0", "node-0"),))
    assert "with it reward/0, which the plan does not name" in run_ray(fake, given).error and not fake.ended


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ({"enableInTreeAutoscaling": True}, "its autoscaler owns workersToDelete"),
        ({"suspend": True}, "suspended"),
    ],
)
def test_a_cluster_that_must_not_be_changed_is_not(ray: FakeKubernetes, spec: dict[str, Any], error: str) -> None:
    ray.clusters["ray"]["spec"].update(spec)
    it = run_ray(ray, on_node(leave_node=True))
    assert error in it.error and not it.changing


def test_the_head_and_pods_without_a_group_stay(ray: FakeKubernetes) -> None:
    assert "the head of RayCluster ray" in run_ray(ray, on_node(9)).error
    worker(ray, "w-1", "node-1", "unknown")
    assert "no worker group unknown" in run_ray(ray).error and not ray.ended


def test_what_others_want_deleted_is_not_overwritten(ray: FakeKubernetes) -> None:
    strategy = {"workersToDelete": ["w-2"]}
    ray.clusters["ray"]["spec"]["workerGroupSpecs"][1]["scaleStrategy"] = strategy
    it = run_ray(ray)
    assert "already to lose w-2" in it.error and not it.changing
    strategy["workersToDelete"] = ["w-gone"]
    assert run_ray(ray).done


def test_a_cluster_that_changes_meanwhile_is_read_again(ray: FakeKubernetes) -> None:
    def answer(call: Call) -> Reply:
        if call.key == "delete-0":
            ray.cluster("ray", group("gpu"), group("cpu"))
        return ray.reply(call)

    uid = ray.uid("w-1")
    assert drive(kuberay().replace(on_node()), answer).done and ray.ended == [uid]
    assert listed(ray) == [{"workersToDelete": []}, None]


def test_pods_that_are_not_deleted_in_time_are_no_longer_asked_for(ray: FakeKubernetes) -> None:
    ray.stuck = True
    it = run_ray(ray, wait_seconds=20)
    assert "has not deleted w-1 within 20 s" in it.error and listed(ray)[1] == {"workersToDelete": []}


def test_a_field_that_cannot_be_cleared_is_told(ray: FakeKubernetes) -> None:
    def answer(call: Call) -> Reply:
        return Reply(status=403, text="forbidden") if call.key.startswith("clear-gpu") else ray.reply(call)

    it = drive(kuberay().replace(on_node()), answer)
    assert "empty scaleStrategy.workersToDelete of group gpu in RayCluster ray by hand" in it.error


def test_after_a_takeover_the_field_is_cleared(ray: FakeKubernetes) -> None:
    ray.clusters["ray"]["spec"]["workerGroupSpecs"][1]["scaleStrategy"] = {"workersToDelete": ["w-gone"]}
    ray.clusters["ray"]["spec"]["workerGroupSpecs"][0]["scaleStrategy"] = {"workersToDelete": ["w-2"]}
    it = run_ray(ray, order(begun=True))
    assert it.done == "rollout/1#2 has ended" and len(it.changing) == 1
    assert listed(ray) == [{"workersToDelete": ["w-2"]}, {"workersToDelete": []}], "that of others stays"


def test_after_a_takeover_a_later_pod_on_the_node_shows_that_it_is_done(ray: FakeKubernetes) -> None:
    uid = ray.uid("w-1")
    ray.clusters["ray"]["spec"]["workerGroupSpecs"][1]["scaleStrategy"] = {"workersToDelete": ["w-1"]}
    ray.replace_pod("w-1")
    for given in (on_node(begun=True), order(member("rollout/1", "node-1", pod_uid=uid), begun=True)):
        it = run_ray(ray, given)
        assert it.done.startswith("rollout/1#2 has ended: ") and listed(ray)[1] == {"workersToDelete": []}
    assert not ray.ended


def test_after_a_takeover_a_deletion_that_goes_on_is_waited_for(ray: FakeKubernetes) -> None:
    uid = ray.uid("w-1")
    ray.stuck = True
    run_ray(ray, wait_seconds=1)
    ray.clusters["ray"]["spec"]["workerGroupSpecs"][1]["scaleStrategy"] = {"workersToDelete": ["w-0", "w-1"]}
    del ray.pods["w-0"]

    def answer(call: Call) -> Reply:
        if call.key == "gone-2":
            del ray.pods["w-1"]
        return ray.reply(call)

    it = drive(kuberay().replace(on_node(begun=True)), answer)
    assert it.done == "RayCluster ray deleted w-1" and ray.ended == [uid] and not listed(ray)[1]["workersToDelete"]


# --- NVSentinel cordons -------------------------------------------------------------------------------------------


REQUESTS = "/apis/nvsentinel.dgxc.nvidia.com/v1/maintenancerequests"


def by_nvsentinel(**more: Any) -> Kubernetes:
    return kubernetes(**{"selector": "app=rollout", "cordon_by": "nvsentinel", **more})


@pytest.mark.parametrize("acts", ["cordons", "drains"])
def test_nvsentinel_cordons_before_the_pod_is_evicted(fake: FakeKubernetes, acts: str) -> None:
    fake.nvsentinel, uid = acts, fake.uid("rollout-1")
    it = drive(by_nvsentinel().replace(on_node(leave_node=True)), fake.reply)
    (name,) = fake.maintenance
    assert it.done.startswith(f"evicted rollout-1; NVSentinel has cordoned node node-1 for MaintenanceRequest {name}")
    assert fake.ended == [uid] and fake.cordoned == ["node-1"]
    assert [(c.method, c.url.partition("svc")[2]) for c in it.calls if c.changes and isinstance(c, HttpCall)] == [
        ("POST", REQUESTS),
        ("POST", f"/api/v1/namespaces/{NAMESPACE}/pods/rollout-1/eviction"),
    ]
    event = fake.maintenance[name]["spec"]["healthEvent"]
    assert event["nodeName"] == "node-1" and "inc-1-x: it hangs" in event["message"]


def test_nvsentinel_is_asked_only_about_a_fault_that_stays_with_a_node_that_is_not_cordoned(
    fake: FakeKubernetes,
) -> None:
    fake.nvsentinel = "cordons"
    assert drive(by_nvsentinel().replace(on_node()), fake.reply).done and not fake.maintenance
    fake.pod("rollout-1", "node-1", labels={"app": "rollout"})
    fake.quarantine("node-1")
    it = drive(by_nvsentinel().replace(on_node(leave_node=True)), fake.reply)
    assert it.done == "evicted rollout-1; node node-1 is cordoned" and not fake.maintenance


@pytest.mark.parametrize(
    ("acts", "error"),
    [
        ("", "NVSentinel was not asked to cordon node node-1, and nothing was ended: status 404"),
        ("disabled", "nothing was ended: status 403: admission webhook .* MaintenanceRequest controller is disabled"),
        ("blocked", "has not cordoned node node-1 within 60 s, and nothing was ended: Blocked: Node node-1 is locked"),
    ],
)
def test_without_nvsentinel_nothing_is_ended(fake: FakeKubernetes, acts: str, error: str) -> None:
    fake.nvsentinel = acts
    it = drive(by_nvsentinel().replace(on_node(leave_node=True)), fake.reply)
    assert re.search(error, it.error) and not fake.ended and not fake.cordoned, it
    assert ("to withdraw it" in it.error) is bool(fake.maintenance)


def test_a_second_request_of_the_same_plan_does_nothing(fake: FakeKubernetes) -> None:
    """The first watch died, or got no answer."""
    fake.nvsentinel = "cordons"

    def answer(call: Call) -> Reply:
        reply = fake.reply(call)
        return Reply(status=NO_STATUS, text="no whole answer within 10 s") if call.key == "maintenance-0" else reply

    it = drive(by_nvsentinel().replace(on_node(leave_node=True)), answer)
    assert it.done and len(fake.maintenance) == 1 and len(fake.ended) == 1
    assert [c.key for c in it.calls if c.key.startswith("maintenance")] == ["maintenance-0", "maintenance-1"]


def test_nvsentinel_drains_the_node_so_all_its_replicas_are_named() -> None:
    others = (
        member("rollout/2", "n-1", pod_uid="other"),
        member("reward/0", "n-1", pod_uid="x"),
        member("rollout/3", "n-2"),
    )
    given = order(member("rollout/1", "n-1", pod_uid="mine"), others=others, leave_node=True)
    for target in (by_nvsentinel(), kuberay(cordon_by="nvsentinel")):
        assert target.also_hit(given) == ["reward/0", "rollout/2"]
    assert by_nvsentinel().also_hit(order(*given.members, others=others)) == []
    assert kubernetes(selector="app=rollout").also_hit(given) == []


def test_nvsentinel_is_not_asked_about_a_node_whose_agents_are_not_known(fake: FakeKubernetes) -> None:
    fake.nvsentinel = "cordons"
    it = drive(kubernetes(pod="{node}", cordon_by="nvsentinel").replace(in_pod(leave_node=True)), fake.reply)
    assert "what runs on node-1 is not known: its agent is named rollout-1" in it.error and not it.changing


def test_nvsentinel_cordons_the_node_of_a_worker_of_ray(ray: FakeKubernetes) -> None:
    ray.nvsentinel, uid = "cordons", ray.uid("w-1")
    it = run_ray(ray, on_node(leave_node=True), cordon_by="nvsentinel")
    assert "RayCluster ray deleted w-1; NVSentinel has cordoned node node-1" in it.done and ray.ended == [uid]


def test_a_worker_of_ray_that_nvsentinel_has_drained_is_not_deleted_again(ray: FakeKubernetes) -> None:
    """KubeRay has made another pod before the RayCluster could be changed."""
    ray.nvsentinel, uid = "drains", ray.uid("w-1")
    it = run_ray(ray, on_node(leave_node=True), cordon_by="nvsentinel")
    assert it.done.startswith("rollout/1#2 has ended: ") and "NVSentinel has cordoned node node-1" in it.done
    assert ray.ended == [uid] and listed(ray) == [None, None]


def on_two_nodes(**more: Any) -> Order:
    """A replica of two ranks; the fault stays with the node of the first."""
    ranks = member("rollout/1", "node-1"), member("rollout/1", "node-2", rank=1)
    return order(*ranks, leave_node=True, **more)


def test_a_replica_on_several_nodes_loses_the_pods_that_nvsentinel_has_not_drained(ray: FakeKubernetes) -> None:
    ray.nvsentinel, uids = "drains", [ray.uid("w-1"), ray.uid("w-2")]
    it = run_ray(ray, on_two_nodes(), cordon_by="nvsentinel")
    assert it.done.startswith("RayCluster ray deleted w-2; NVSentinel has cordoned node node-1"), it
    assert ray.ended == uids and listed(ray)[1] == {"workersToDelete": []} and "w-0" in ray.pods


@pytest.mark.parametrize("left", [True, False])
def test_a_replica_of_several_hosts_is_deleted_without_the_host_that_nvsentinel_has_drained(left: bool) -> None:
    """No other pod can start on the node. `left`: KubeRay has not deleted the other host by itself."""
    fake = FakeKubernetes()
    fake.cluster("ray", group(hosts=2))
    for n in range(4):
        worker(fake, f"w-{n}", f"node-{n}", **{REPLICA_LABEL: f"gpu-{n // 3}"})
    fake.pods.pop("w-0")
    fake.nvsentinel, uid = "cordons", fake.uid("w-2")

    def answer(call: Call) -> Reply:
        reply = fake.reply(call)
        if call.key == "maintenance-0":
            for name in ("w-1",) if left else ("w-1", "w-2"):
                fake.pods.pop(name)
            fake._pods_changed()
        return reply

    it = drive(kuberay(cordon_by="nvsentinel").replace(on_two_nodes()), answer)
    assert "NVSentinel has cordoned node node-1" in it.done, it
    assert ("deleted w-2" in it.done) is left and fake.ended == ([uid] if left else []) and "w-3" in fake.pods


@pytest.mark.parametrize("kind", ["kuberay", "kubernetes"])
def test_a_watch_that_takes_over_ends_what_the_drain_has_left(ray: FakeKubernetes, kind: str) -> None:
    """The processes on the drained node are gone, so that its order has none there."""
    uid = ray.uid("w-2")
    given = replace(order(member("rollout/1", "node-2", rank=1), leave_node=True, begun=True), node="node-1")
    target = kuberay(cordon_by="nvsentinel") if kind == "kuberay" else by_nvsentinel(selector="ray.io/cluster=ray")
    it = drive(target.replace(given), ray.reply)
    assert it.error == "no rank of rollout/1 is on node-1, which it should leave" and not it.changing
    ray.quarantine("node-1")
    it = drive(target.replace(given), ray.reply)
    assert it.done.endswith("w-2; node node-1 is cordoned") and ray.ended == [uid]


def test_a_dry_run_names_the_request_to_nvsentinel(fake: FakeKubernetes, tmp_path: Path) -> None:
    fake.nvsentinel = "cordons"
    (tmp_path / "token").write_text("secret")
    with served(fake, "secret") as url:
        target = by_nvsentinel(api=url, token_path=str(tmp_path / "token"))
        calls, end = calls_of(target, on_node(leave_node=True))
    shown = [c.shown for c in calls]
    assert len(shown) == 2 and shown[0].startswith(f"POST {url}{REQUESTS} {{") and '"nodeName": "node-1"' in shown[0]
    assert end.startswith("evicted rollout-1") and not fake.maintenance and not fake.ended


# --- both, over HTTP ----------------------------------------------------------------------------------------------


def test_a_dry_run_names_the_calls_and_changes_nothing(
    fake: FakeKubernetes, ray: FakeKubernetes, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with served(fake, "secret") as url:
        calls, end = calls_of(kubernetes(pod="{node}", api=url, token_path=str(token)), in_pod(leave_node=True))
    assert [c.shown.partition(" {")[0] for c in calls] == [
        f"PATCH {url}/api/v1/nodes/node-1",
        f"POST {url}/api/v1/namespaces/rl/pods/rollout-1/eviction",
    ]
    assert end == "evicted rollout-1; node node-1 is cordoned" and not fake.ended and not fake.cordoned
    with served(ray, "secret") as url:
        calls, end = calls_of(kuberay(api=url, token_path=str(token)), on_node())
    at = "/spec/workerGroupSpecs/1/scaleStrategy"
    operations = [c.body[-1] for c in calls if isinstance(c, HttpCall)]
    assert operations == [
        {"op": "add", "path": at, "value": {"workersToDelete": ["w-1"]}},
        {"op": "replace", "path": f"{at}/workersToDelete", "value": []},
    ]
    assert end == "RayCluster ray deleted w-1" and not ray.ended and listed(ray) == [None, None]


def make(call: Call) -> Reply:
    assert call.after_seconds < 60
    return call.make()


def test_a_pod_is_evicted_over_http(fake: FakeKubernetes, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    uid = fake.uid("rollout-1")
    with served(fake, "secret") as url:
        target = kubernetes(pod="{node}", api=url, token_path=str(token))
        assert drive(target.replace(in_pod()), make).done == "evicted rollout-1" and fake.ended == [uid]
        token.write_text("expired")
        assert "status 401: Unauthorized" in drive(target.replace(in_pod()), make).error


def test_a_server_that_answers_too_late_may_have_evicted_and_is_asked_again(
    fake: FakeKubernetes, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    uid, slow = fake.uid("rollout-1"), [1.0]
    with served(fake, "secret", lambda method: slow.pop() if method == "POST" and slow else 0.0) as url:
        target = kubernetes(pod="{node}", api=url, token_path=str(token), call_seconds=0.3)
        it = drive(target.replace(in_pod()), make)
    assert it.done and fake.ended == [uid], "the second eviction names the same UID"


def test_without_a_server_nothing_is_done(tmp_path: Path) -> None:
    it = drive(kubernetes(pod="{node}", api="http://127.0.0.1:9", token_path="").replace(in_pod()), make)
    assert "connection refused" in it.error.lower() and not it.changing


# --- configuration and permissions --------------------------------------------------------------------------------


def _granted(path: Path) -> dict[str, set[tuple[str, str, str]]]:
    """Kind of a role -> (verb, API group, resource)."""
    granted: dict[str, set[tuple[str, str, str]]] = {}
    for manifest in yaml.safe_load_all(path.read_text()):
        for rule in manifest.get("rules", ()):
            for verb in rule["verbs"]:
                for api_group in rule["apiGroups"]:
                    for resource in rule["resources"]:
                        granted.setdefault(manifest["kind"], set()).add((verb, api_group, resource))
    return granted


def test_the_role_grants_exactly_the_verbs_that_are_used(fake: FakeKubernetes, ray: FakeKubernetes) -> None:
    drive(kubernetes(pod="{node}").replace(in_pod(leave_node=True)), fake.reply)
    drive(kubernetes(selector="app=rollout").replace(on_node(leave_node=True)), fake.reply)
    run_ray(ray, on_node(leave_node=True))
    granted = _granted(ROLE)
    used = set(fake.asked) | set(ray.asked)
    assert granted["ClusterRole"] == {one for one in used if one[2] == "nodes"}
    assert granted["Role"] == {one for one in used if one[2] != "nodes"}
    more, before = _granted(NVSENTINEL_ROLE), used
    for acts in ("cordons", "blocked"):
        asked = FakeKubernetes()
        asked.pod("rollout-1", "node-1", labels={"app": "rollout"})
        asked.nvsentinel = acts
        drive(by_nvsentinel().replace(on_node(leave_node=True)), asked.reply)
        used = used | set(asked.asked)
    assert more["ClusterRole"] == used - before


@pytest.mark.parametrize("path", [ROLE, NVSENTINEL_ROLE], ids=lambda p: p.stem)
def test_the_account_is_bound_to_its_roles(path: Path) -> None:
    account = next(m for m in yaml.safe_load_all(ROLE.read_text()) if m["kind"] == "ServiceAccount")["metadata"]
    manifests = {m["kind"]: m for m in yaml.safe_load_all(path.read_text())}
    for kind in {"ClusterRole", "Role"} & set(manifests):
        binding, role = manifests[f"{kind}Binding"], manifests[kind]
        assert binding["roleRef"] == {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": kind,
            "name": role["metadata"]["name"],
        }
        assert binding["subjects"] == [{"kind": "ServiceAccount", **account}]
    if "Role" in manifests:
        assert manifests["Role"]["metadata"]["namespace"] == manifests["RoleBinding"]["metadata"]["namespace"]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"kind": "kubernetes"}, "give either pod or selector"),
        ({"kind": "kubernetes", "pod": "{node}", "selector": "a=b"}, "give either pod or selector"),
        ({"kind": "kubernetes", "pod": "{pid}"}, r"\{pid\} is not known here, only \{index\}, \{job\}, \{node\}"),
        ({"kind": "kubernetes", "pod": "{replica}"}, r"\{replica\} is not known here, only \{index\}"),
        ({"kind": "kubernetes", "selector": "app={replica}"}, r"\{replica\} is not known here, only \{index\}"),
        ({"kind": "kuberay", "cluster": "ray", "selector": "app={replica}"}, r"\{replica\} is not known here"),
        ({"kind": "kubernetes", "pod": "x", "namespace": "a/b"}, "namespace"),
        ({"kind": "kubernetes", "pod": "x", "api": "ftp://x"}, "api"),
        ({"kind": "kubernetes", "pod": "x", "cordon": False, "cordon_by": "nvsentinel"}, "needs cordon: true"),
        ({"kind": "kuberay"}, "cluster"),
        ({"kind": "kuberay", "cluster": "../pods"}, "cluster"),
        ({"kind": "kuberay", "cluster": "ray", "wait_seconds": 200}, "at most half of deadline_seconds"),
    ],
)
def test_mistakes_are_named(more: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_watched({"actuator": {"namespace": NAMESPACE, **more}}, "watch.yaml")


def test_the_configuration_names_its_target() -> None:
    for kind, more in (("kubernetes", {"pod": "{node}"}), ("kuberay", {"cluster": "ray"}), ("slurm", {})):
        place = {} if kind == "slurm" else {"namespace": NAMESPACE}
        config = parse_watched({"roles": ["rollout"], "actuator": {"kind": kind, **place, **more}}).actuator
        assert config is not None and target_of(config).name == kind
        json.dumps(config.model_dump(mode="json"))
