"""KubeRay: has the operator delete the worker pods of a replica, and make others.

The names of the pods go into `scaleStrategy.workersToDelete` of their group while `replicas` stays: KubeRay deletes
these pods, then makes as many as are missing. The field holds names, and KubeRay never clears it, so it is cleared when
the pods are gone. Each change is a JSON patch that tests the resource version that was read: KubeRay changes the
RayCluster whenever its pods change, so that a name never meets a later pod, and nobody else's change is overwritten.
(A merge patch would have to repeat all groups, with the environments of their pods.)
"""

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from rolecall.core.config.actuators import KubeRayActuator
from rolecall.core.diagnosis import ActionKind
from rolecall.core.errors import ActuatorError
from rolecall.core.text import plain
from rolecall.recovery.actuators.calls import NOT_SENT, Call, Procedure, Reply
from rolecall.recovery.actuators.targets.kubernetes_api import (
    CONFLICT,
    JSON_PATCH,
    TRIES_MAX,
    KubernetesApi,
    Pod,
    order_left,
    pods_of_members,
    read_object,
    said,
)
from rolecall.recovery.actuators.targets.target import HasEnded, Order, filled

CLUSTER_LABEL = "ray.io/cluster"
GROUP_LABEL = "ray.io/group"
TYPE_LABEL = "ray.io/node-type"
REPLICA_LABEL = "ray.io/worker-group-replica-name"
"""The same for all hosts of one replica of a group with several; KubeRay 1.5 and newer, with its feature gate
RayMultiHostIndexing."""
TEST_FAILED = 422
"""Status for a JSON patch whose `test` does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A worker group of the RayCluster. `index`: its place in the list; `listed`: its `workersToDelete`; `strategy`: it
    has a `scaleStrategy`, which has further fields."""

    version: str
    index: int
    name: str
    replicas: Any
    hosts: int
    listed: tuple[str, ...]
    strategy: bool


@dataclass(slots=True)
class _Progress:
    """`asked`: group -> pods whose deletion was asked for without an answer; whether it was is then seen. `cordoned`:
    to be added to a sentence."""

    asked: dict[str, list[Pod]] = field(default_factory=dict)
    cordoned: str = ""


class KubeRay:
    name = "kuberay"

    def __init__(self, config: KubeRayActuator) -> None:
        self._config, self._api = config, KubernetesApi(config)
        move = {ActionKind.REPLACE_NODE} if config.cordon else set()
        self.supports = frozenset({ActionKind.REPLACE_REPLICA, *move})
        self._words = f"RayCluster {config.cluster}"
        self._path = f"/apis/ray.io/v1/namespaces/{config.namespace}/rayclusters/{quote(config.cluster, safe='')}"

    def also_hit(self, order: Order) -> Sequence[str]:
        return self._api.also_hit(order, self._config.selector)

    def replace(self, order: Order) -> Procedure:
        if not order.members:
            if not order.begun:
                raise ActuatorError(f"no process of {order.replica}#{order.incarnation} is seen: nothing to delete")
            return (yield from self._finish(f"{order.replica}#{order.incarnation} has ended"))
        progress = _Progress()
        try:
            try:
                return (yield from self._delete(order, progress)) + progress.cordoned
            except HasEnded as e:
                # Gone with its node, whose cordon was waited for, too: KubeRay makes another one.
                if order.begun or progress.asked or progress.cordoned:
                    ended = f"{order.replica}#{order.incarnation} has ended: {e}{progress.cordoned}"
                    return (yield from self._finish(ended))
                raise
            except ActuatorError:
                for group, pods in progress.asked.items():
                    yield from self._clear(group, tuple(p.name for p in pods))
                raise
        except ActuatorError as e:
            raise ActuatorError(f"{e}{progress.cordoned}") from None

    def _delete(self, order: Order, progress: _Progress) -> Procedure:
        tried = Reply(status=NOT_SENT)
        for n in range(TRIES_MAX):
            cluster = yield from self._cluster(f"cluster-{n}")
            for name, pods in progress.asked.items():
                names, group = tuple(p.name for p in pods), self._groups(cluster).get(name)
                if group is not None and group.listed == names:
                    progress.asked.clear()
                    return (yield from self._wait_and_clear(cluster, group, names, pods))
            partly = order.begun or bool(progress.cordoned)
            pods, by_node = yield from self._find(order, n, partly=partly)
            if order.leave_node and not progress.cordoned and order.node not in by_node and order.begun:
                progress.cordoned = yield from self._api.cordoned_before(order)
            group = self._group_of(cluster, pods, whole=not partly)
            names = tuple(p.name for p in pods)
            existing = yield from self._existing(group, n)
            if not set(existing) <= set(names):
                raise ActuatorError(
                    f"{self._words}: group {group.name} is already to lose {', '.join(existing)}, which rolecall did"
                    " not ask for; nothing was ended"
                )
            if order.leave_node and not progress.cordoned:
                if order.node not in by_node:
                    raise ActuatorError(f"no rank of {order.replica} is on {order.node}, which it should leave")
                progress.cordoned = yield from self._api.cordon(by_node[order.node].node, order)
            if set(names) <= set(group.listed):  # an earlier watch has asked for it
                return (yield from self._wait_and_clear(cluster, group, group.listed, pods))
            tried = yield self._patch(
                f"delete-{n}",
                f"have {self._words} delete {', '.join(names)}",
                group,
                _listing(group, names),
            )
            if tried.status == 200:
                progress.asked.clear()
                return (yield from self._wait_and_clear(cluster, group, names, pods))
            if tried.unavailable:
                progress.asked[group.name] = pods
            elif tried.status not in (CONFLICT, TEST_FAILED):
                break
        raise ActuatorError(f"{self._words} was not changed: {said(tried)}")

    # --- reading ------------------------------------------------------------------------------------------------------

    def _cluster(self, key: str, assumed: Reply | None = None) -> Generator[Call, Reply, dict[str, Any]]:
        words = f"read {self._words}"
        value = read_object((yield from self._api.read(key, words, self._path, assumed)), words)
        metadata, spec = value.get("metadata"), value.get("spec")
        if not isinstance(metadata, dict) or not isinstance(spec, dict) or metadata.get("name") != self._config.cluster:
            raise ActuatorError(f"{words}: the answer is another object")
        if not metadata.get("resourceVersion"):
            raise ActuatorError(f"{words}: the answer has no resource version")
        return value

    def _find(self, order: Order, n: int, *, partly: bool) -> Generator[Call, Reply, tuple[list[Pod], dict[str, Pod]]]:
        """The pods to delete, by name, and those that hold the members by their node. `partly`: pods may be gone
        because of this order, as on a node that was cordoned, and others left. Raises ActuatorError: it is not clear
        which ones, or they hold others that the plan does not name; HasEnded: the pod of a member is gone, if `partly`
        all of them."""
        cluster = f"{CLUSTER_LABEL}={self._config.cluster}"
        pods: dict[str, Pod] = {}
        for i, further in enumerate(sorted({filled(self._config.selector, m) for m in order.members})):
            selector = f"{cluster},{further}" if further else cluster
            pods.update({p.name: p for p in (yield from self._api.pods(f"pods-{n}-{i}", selector))})
        if partly:
            order = order_left(order, list(pods.values()), self._words)
        by_node = pods_of_members(order, list(pods.values()), self._words)
        chosen = {p.name: p for p in by_node.values()}
        for pod in by_node.values():
            if pod.labels.get(TYPE_LABEL) != "worker":
                raise ActuatorError(f"{order.replica} runs in {pod.name}, the head of {self._words}, not in a worker")
        replicas = {p.labels[REPLICA_LABEL] for p in chosen.values() if REPLICA_LABEL in p.labels}
        if replicas:
            everywhere = yield from self._api.pods(
                f"hosts-{n}", f"{cluster},{REPLICA_LABEL} in ({','.join(sorted(replicas))})"
            )
            chosen.update({p.name: p for p in everywhere if not p.ended})
        named = set(self.also_hit(order))
        for pod in chosen.values():
            hit = {
                m.label for m in order.others if m.node in (pod.name, pod.node) and m.pod_uid in ("", pod.uid)
            } - named
            if hit and pod.name not in {p.name for p in by_node.values()}:
                raise ActuatorError(
                    f"pod {pod.name} ends with {order.replica}, and with it {', '.join(sorted(hit))}, which the plan"
                    " does not name"
                )
        return sorted(chosen.values(), key=lambda p: p.name), by_node

    def _group_of(self, cluster: Mapping[str, Any], pods: Sequence[Pod], *, whole: bool) -> _Group:
        """The group of all these pods. `whole`: no host of theirs may be missing. Raises ActuatorError: they are not
        whole replicas of one, or it must not be changed."""
        spec = cluster["spec"]
        if spec.get("enableInTreeAutoscaling"):
            raise ActuatorError(f"{self._words} has enableInTreeAutoscaling: its autoscaler owns workersToDelete")
        if spec.get("suspend") or cluster["metadata"].get("deletionTimestamp"):
            raise ActuatorError(f"{self._words} is being suspended or deleted")
        names = sorted({p.labels.get(GROUP_LABEL, "") for p in pods})
        if len(names) > 1:
            raise ActuatorError(f"the pods {', '.join(p.name for p in pods)} are of several groups: {', '.join(names)}")
        group = self._groups(cluster).get(names[0])
        if group is None:
            raise ActuatorError(f"{self._words} has no worker group {names[0] or '(pod without the label)'}")
        if group.hosts > 1:
            by_replica: dict[str, int] = {}
            for pod in pods:
                replica = pod.labels.get(REPLICA_LABEL, "")
                by_replica[replica] = by_replica.get(replica, 0) + 1
            missing = [group.hosts - found for found in by_replica.values()]
            if "" in by_replica or min(missing) < 0 or (whole and any(missing)):
                raise ActuatorError(
                    f"group {group.name} has {group.hosts} hosts in a replica, and label {REPLICA_LABEL} does not show"
                    f" as many pods: {', '.join(p.name for p in pods)}"
                )
        return group

    def _groups(self, cluster: Mapping[str, Any]) -> dict[str, _Group]:
        found: dict[str, _Group] = {}
        try:
            for index, value in enumerate(cluster["spec"].get("workerGroupSpecs") or ()):
                listed = (value.get("scaleStrategy") or {}).get("workersToDelete") or ()
                name = str(value["groupName"])
                found[name] = _Group(
                    version=str(cluster["metadata"]["resourceVersion"]),
                    index=index,
                    name=name,
                    replicas=value.get("replicas"),
                    hosts=int(value.get("numOfHosts") or 1),
                    listed=tuple(str(one) for one in listed),
                    strategy=value.get("scaleStrategy") is not None,
                )
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise ActuatorError(f"{self._words}: its groups cannot be read: {plain(repr(e), 200)}") from None
        return found

    def _existing(self, group: _Group, n: int) -> Generator[Call, Reply, list[str]]:
        """The pods in its `workersToDelete` that still exist."""
        found: list[str] = []
        for i, name in enumerate(group.listed):
            pod = yield from self._api.pod(f"listed-{group.index}-{n}-{i}", name)
            if pod is not None and not pod.ended:
                found.append(name)
        return found

    # --- changing -----------------------------------------------------------------------------------------------------

    def _patch(self, key: str, words: str, group: _Group, operation: Mapping[str, Any]) -> Call:
        tests: list[Mapping[str, Any]] = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": group.version},
            {"op": "test", "path": f"{_at(group)}/groupName", "value": group.name},
        ]
        if group.replicas is not None:
            tests.append({"op": "test", "path": f"{_at(group)}/replicas", "value": group.replicas})
        body = [*tests, operation]
        return self._api.call(key, words, "PATCH", self._path, body=body, content_type=JSON_PATCH)

    def _wait_and_clear(
        self, cluster: dict[str, Any], group: _Group, names: tuple[str, ...], pods: Sequence[Pod]
    ) -> Procedure:
        failed, left = "", tuple[str, ...]()
        try:
            left = yield from self._api.wait_until_gone(pods, self._config.wait_seconds)
        except ActuatorError as e:
            failed = str(e)
        cluster["spec"]["workerGroupSpecs"][group.index]["scaleStrategy"] = {"workersToDelete": list(names)}
        yield from self._clear(group.name, names, Reply(status=200, text=json.dumps(cluster)))
        if left:
            failed = f"{self._words} has not deleted {', '.join(left)} within {self._config.wait_seconds:g} s"
        if failed:
            raise ActuatorError(f"{failed}; it is no longer asked to")
        return f"{self._words} deleted {', '.join(p.name for p in pods)}"

    def _clear(self, name: str, names: tuple[str, ...], assumed: Reply | None = None) -> Generator[Call, Reply, None]:
        """Empties `workersToDelete` of group `name` if it still holds what was put there. `assumed`: the RayCluster as
        a dry run takes it to be then. Raises ActuatorError: it cannot."""
        tried = Reply(status=NOT_SENT)
        for n in range(TRIES_MAX):
            try:
                cluster = yield from self._cluster(f"clear-read-{name}-{n}", assumed)
            except ActuatorError as e:
                raise ActuatorError(f"{e}; {self._by_hand(name)}") from None
            group = self._groups(cluster).get(name)
            if group is None or group.listed != names:
                return
            tried = yield self._patch(
                f"clear-{name}-{n}",
                f"clear workersToDelete of group {name}",
                group,
                {"op": "replace", "path": f"{_at(group)}/scaleStrategy/workersToDelete", "value": []},
            )
            if tried.status == 200:
                return
            if tried.status not in (CONFLICT, TEST_FAILED) and not tried.unavailable:
                break
        raise ActuatorError(f"{said(tried)}; {self._by_hand(name)}")

    def _by_hand(self, name: str) -> str:
        return f"empty scaleStrategy.workersToDelete of group {name} in {self._words} by hand"

    def _finish(self, done: str) -> Procedure:
        """An earlier watch has asked for the deletion, and the pods are gone: clears what it left."""
        cluster = yield from self._cluster("cluster")
        for group in self._groups(cluster).values():
            if group.listed and not (yield from self._existing(group, 0)):
                yield from self._clear(group.name, group.listed)
        return done


def _listing(group: _Group, names: Sequence[str]) -> Mapping[str, Any]:
    """The operation that puts `names` into `workersToDelete` and leaves the other fields of `scaleStrategy`."""
    if group.strategy:
        return {"op": "add", "path": f"{_at(group)}/scaleStrategy/workersToDelete", "value": list(names)}
    return {"op": "add", "path": f"{_at(group)}/scaleStrategy", "value": {"workersToDelete": list(names)}}


def _at(group: _Group) -> str:
    return f"/spec/workerGroupSpecs/{group.index}"
