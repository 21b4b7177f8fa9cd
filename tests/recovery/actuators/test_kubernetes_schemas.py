"""What is sent to Kubernetes and KubeRay is valid by the published schemas, and changes nothing but what it should.

The fake API server of these tests validates all that it gets, too; that it does is shown here.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from rolecall.recovery.actuators.calls import HttpCall
from rolecall.recovery.actuators.targets.kuberay import GROUP_LABEL, TYPE_LABEL
from rolecall.recovery.actuators.targets.kubernetes_api import ANNOTATION, JSON_PATCH, MERGE_PATCH
from tests.recovery.actuators.driving import drive, member, order
from tests.recovery.actuators.kubernetes_fake import NAMESPACE, FakeKubernetes
from tests.recovery.actuators.kubernetes_schemas import SUPPORTED, problems, selector_problem
from tests.recovery.actuators.test_kubernetes import group, kuberay, kubernetes, on_node, worker

SIDECAR = Path(__file__).parents[3] / "deploy" / "kubernetes" / "ray-sidecar.yaml"
NODE = "node-1"


def changes(target: Any, fake: FakeKubernetes) -> Iterator[tuple[HttpCall, dict[str, Any], dict[str, Any]]]:
    """The changing calls of a replacement that leaves its node, each with its object before and after."""
    before: dict[str, Any] = {}
    found = []

    def holds(call: Any) -> dict[str, Any]:
        return copy.deepcopy(fake.nodes[NODE] if "/nodes/" in call.url else next(iter(fake.clusters.values()), {}))

    def answer(call: Any) -> Any:
        before.clear()
        before.update(holds(call))
        reply = fake.reply(call)
        if call.changes:
            assert reply.status in (200, 201), reply
            found.append((call, copy.deepcopy(before), holds(call)))
        return reply

    it = drive(target.replace(on_node(leave_node=True)), answer)
    assert it.done, it
    return iter(found)


@pytest.fixture
def pods() -> FakeKubernetes:
    it = FakeKubernetes()
    it.pod("rollout-1", NODE, labels={"app": "rollout"})
    return it


@pytest.fixture
def ray() -> FakeKubernetes:
    """Its RayCluster is that of deploy/, as it is, and its group is to lose whole replicas that somebody else named."""
    it = FakeKubernetes()
    (cluster,) = [m for m in yaml.safe_load_all(SIDECAR.read_text()) if m["kind"] == "RayCluster"]
    cluster["metadata"]["resourceVersion"] = "7"
    cluster["spec"]["workerGroupSpecs"][0]["scaleStrategy"] = {"multihostReplicasToDelete": ["r-9"]}
    it.clusters["my-raycluster"] = cluster
    for n in range(2):
        worker(it, f"w-{n}", f"node-{n}", "workers", **{"ray.io/cluster": "my-raycluster"})
    return it


@pytest.mark.parametrize("version", SUPPORTED)
def test_an_eviction_is_one(pods: FakeKubernetes, version: str) -> None:
    _, (call, _, _) = changes(kubernetes(selector="app=rollout"), pods)
    assert (call.method, call.content_type) == ("POST", "application/json")
    assert call.body["kind"] == "Eviction" and problems(call.body, version) == []
    assert problems({**call.body, "deleteOptions": {"preconditions": {"uuid": "1"}}}, version)


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_cordon_changes_two_fields_of_a_node(pods: FakeKubernetes, version: str) -> None:
    (call, before, after), _ = changes(kubernetes(selector="app=rollout"), pods)
    assert (call.method, call.content_type) == ("PATCH", MERGE_PATCH)
    assert problems(after, version) == []
    because = after["metadata"]["annotations"].pop(ANNOTATION)
    assert "inc-1-x" in because and after["spec"].pop("unschedulable") is True
    del before["metadata"]["resourceVersion"], after["metadata"]["resourceVersion"], after["metadata"]["annotations"]
    assert after == before


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_cluster_of_ray_is_changed_in_one_field(ray: FakeKubernetes, version: str) -> None:
    found = list(changes(kuberay(cluster="my-raycluster"), ray))
    assert [call.content_type for call, _, _ in found] == [MERGE_PATCH, JSON_PATCH, JSON_PATCH]
    listed = []
    for _, before, after in found[1:]:
        assert problems(after, version) == []
        strategies = [value["spec"]["workerGroupSpecs"][0]["scaleStrategy"] for value in (before, after)]
        listed.append(strategies[1].pop("workersToDelete"))
        strategies[0].pop("workersToDelete", None)
        assert strategies == [{"multihostReplicasToDelete": ["r-9"]}] * 2, "what somebody else has named stays"
        before["metadata"].pop("resourceVersion"), after["metadata"].pop("resourceVersion")
        assert after == before
    assert listed == [["w-1"], []]


def test_a_deletion_is_asked_for_as_rays_own_autoscaler_does() -> None:
    """Real code: the part of Ray that runs beside KubeRay's operator."""
    provider = pytest.importorskip("ray.autoscaler._private.kuberay.node_provider")
    assert (provider.KUBERAY_LABEL_KEY_KIND, provider.KUBERAY_LABEL_KEY_TYPE) == (TYPE_LABEL, GROUP_LABEL)
    assert provider.KUBERAY_KIND_WORKER == "worker"
    fake = FakeKubernetes()
    fake.cluster("ray", group("cpu"), group("gpu"))
    worker(fake, "w-1", NODE)
    _, (call, _, _), _ = changes(kuberay(), fake)
    theirs = provider.worker_delete_patch("1", ["w-1"])
    assert [call.body[-1][key] for key in ("path", "value")] == [theirs["path"], theirs["value"]]
    place = provider.url_from_resource(NAMESPACE, "rayclusters/ray", kubernetes_host="https://k:443")
    assert urlsplit(call.url).path == urlsplit(place).path


# --- the fake refuses what a server would ---------------------------------------------------------------------------


EVICTION = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "rollout-1", "namespace": NAMESPACE}}
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


@pytest.mark.parametrize(
    ("method", "path", "content_type", "body", "code"),
    [
        ("POST", f"{PODS}/rollout-1/eviction", "application/json", {**EVICTION, "gracePeriod": 1}, 400),
        ("POST", f"{PODS}/rollout-1/eviction", "application/json", {**EVICTION, "apiVersion": "policy/v2"}, 400),
        ("POST", f"{PODS}/rollout-1/eviction", "application/json", {**EVICTION, "metadata": {"name": "x"}}, 400),
        ("POST", f"{PODS}/rollout-1/eviction", "application/merge-patch+json", EVICTION, 415),
        ("PATCH", f"/api/v1/nodes/{NODE}", "application/json", {}, 415),
        ("PATCH", f"/api/v1/nodes/{NODE}", MERGE_PATCH, {"spec": {"unschedulabel": True}}, 400),
        ("PATCH", f"/api/v1/nodes/{NODE}", MERGE_PATCH, {"spec": {"unschedulable": "yes"}}, 400),
        ("GET", f"{PODS}?labelSelector=app%3Drollout%2F1", "", None, 400),
        ("GET", "/api/v1/namespaces/other/pods/rollout-1", "", None, 404),
        ("DELETE", f"/api/v1/nodes/{NODE}", "", None, 404),
    ],
)
def test_the_fake_server_refuses(
    pods: FakeKubernetes, method: str, path: str, content_type: str, body: Any, code: int
) -> None:
    before = json.dumps([pods.nodes, pods.pods])
    if method == "PATCH":
        body = {**body, "metadata": {"resourceVersion": pods.nodes[NODE]["metadata"]["resourceVersion"]}}
    place, _, query = path.partition("?")
    status, answer = pods.handle(method, place, query, content_type, body)
    assert status == code and answer["kind"] == "Status" and answer["status"] == "Failure"
    assert json.dumps([pods.nodes, pods.pods]) == before and not pods.ended


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"replicaz": 2}, "replicaz"),
        ({"scaleStrategy": {"workersToDelete": "w-1"}}, "workersToDelete"),
        ({"template": {"spec": {"containers": [{"nam": "x"}]}}}, "containers"),
        ({"minReplicas": None}, "minReplicas"),
    ],
)
def test_mistakes_in_a_cluster_of_ray_are_found(ray: FakeKubernetes, value: dict[str, Any], problem: str) -> None:
    cluster = ray.clusters["my-raycluster"]
    assert problems(cluster) == []
    cluster["spec"]["workerGroupSpecs"][0].update(value)
    assert problem in " ".join(problems(cluster))


@pytest.mark.parametrize(
    ("selector", "valid"),
    [
        *((s, True) for s in ("app=rollout", "a==b,c!=d", "ray.io/group in (a,b),x", "!x", "a=", "a notin (b)")),
        *((s, False) for s in ("app=rollout/1", "=b", "a=b,", "a=b c", "a in b", f"a={'x' * 64}")),
    ],
)
def test_selectors_are_read_as_a_server_does(selector: str, valid: bool) -> None:
    assert (selector_problem(selector) == "") is valid


def test_a_label_that_no_server_accepts_ends_the_action(pods: FakeKubernetes) -> None:
    given = order(member("rollout/1", NODE, job="node-0:29500"))
    it = drive(kubernetes(selector="job={job}").replace(given), pods.reply)
    assert (
        "list the pods with job=node-0:29500: status 400: unable to parse requirement" in it.error and not it.changing
    )
