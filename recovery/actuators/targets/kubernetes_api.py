"""What the targets of Kubernetes share: reading pods, telling which of them hold a replica, and cordoning its node.

A pod's name says nothing about time: a StatefulSet gives it to the next pod, too. A process's cgroup tells the UID of
its pod. Where the agent cannot read that, as in an agent in the same pod, a pod holds a process only if its container
started before the agent first saw the process. From then on the pod is meant by its UID. Changes of nodes carry the
resource version that was read, so that a change by someone else in between is a conflict, and is read again.

Where NVSentinel runs, it may cordon the node instead (`cordon_by`): a MaintenanceRequest names the node, and NVSentinel
cordons and drains it. It acts at once and undoes it when the request is deleted, which a person does.
"""

import hashlib
import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import count
from typing import Any
from urllib.parse import quote, urlencode

from rolecall.core.config.actuators import KubeRayActuator, KubernetesActuator
from rolecall.core.errors import ActuatorError
from rolecall.core.ids import split_replica
from rolecall.core.text import plain
from rolecall.recovery.actuators.calls import NOT_SENT, Call, HttpCall, Reply
from rolecall.recovery.actuators.targets.target import HasEnded, Member, Order, filled

CLOCKS_DIFFER_SECONDS = 2.0
"""Between two nodes; Kubernetes rounds times down to seconds."""
TRIES_MAX = 4
"""Of a read without an answer, or of a change that met a conflict or no answer."""
POLL_SECONDS = (1.0, 2.0, 3.0, 5.0)
"""Between two looks at whether a pod is gone; the last one repeats."""
ANNOTATION = "rolecall/cordoned-because"
ANNOTATION_CHARACTERS = 300
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
GONE = 404
CONFLICT = 409
EXPIRED = 410
"""Status for a list that is continued too late: etcd keeps what it was for five minutes."""
PAGE_PODS = 100
"""In one answer: with the fields of its managers a pod has 10 KB and more, and an answer at most `REPLY_BYTES_MAX`."""
NVSENTINEL = "nvsentinel.dgxc.nvidia.com/v1"
MAINTENANCE_REQUESTS = f"/apis/{NVSENTINEL}/maintenancerequests"
CORDON_SECONDS = 60.0
"""For NVSentinel to cordon a node: its event passes a datastore; a lock on the node is tried again every 30 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """`started_at`: of the container with the job's processes, wall seconds; 0: it does not run. `owner`: kind of its
    controller; empty: none, so that nothing would make another one."""

    name: str
    uid: str
    node: str
    phase: str
    started_at: float
    deleting: bool = False
    owner: str = ""
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


class KubernetesApi:
    def __init__(self, config: KubernetesActuator | KubeRayActuator) -> None:
        self._config = config
        self.namespaced = f"/api/v1/namespaces/{quote(config.namespace, safe='')}"

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(
        self,
        key: str,
        words: str,
        method: str,
        path: str,
        *,
        body: Any = None,
        content_type: str = "application/json",
        prepares: bool = False,
        assumed: Reply | None = None,
        after_seconds: float = 0.0,
    ) -> HttpCall:
        """Every change names a UID or resource version, and is therefore repeatable: a second time does nothing."""
        changes = method != "GET"
        return HttpCall(
            key=key,
            words=words,
            method=method,
            url=self._config.api.rstrip("/") + path,
            body=body,
            content_type=content_type,
            changes=changes,
            prepares=prepares,
            repeatable=changes,
            assumed=Reply(status=200, text="{}") if changes and assumed is None else assumed,
            token_path=self._config.token_path,
            ca_path=self._config.ca_path if self._config.api.startswith("https:") else "",
            deadline_seconds=self._config.call_seconds,
            after_seconds=after_seconds,
        )

    def read(self, key: str, words: str, path: str, assumed: Reply | None = None) -> Generator[Call, Reply, Reply]:
        """Asks again if there is no answer, or one that says that the server cannot answer now."""
        reply = Reply(status=NOT_SENT)
        for n in range(TRIES_MAX):
            reply = yield self.call(f"{key}-{n}", words, "GET", path, assumed=assumed, after_seconds=float(n))
            if not reply.unavailable:
                break
        return reply

    def pod(self, key: str, name: str) -> Generator[Call, Reply, Pod | None]:
        """None: there is none. Raises ActuatorError: it cannot be read."""
        words = f"read pod {name}"
        reply = yield from self.read(key, words, f"{self.namespaced}/pods/{quote(name, safe='')}")
        if reply.status == GONE:
            return None
        return self._pod_of(read_object(reply, words))

    def pods(self, key: str, selector: str) -> Generator[Call, Reply, list[Pod]]:
        """Raises ActuatorError: they cannot be read."""
        words = f"list the pods with {selector}"
        found, token, expired = list[Pod](), "", 0
        for n in count():
            query = urlencode({"labelSelector": selector, "limit": PAGE_PODS} | ({"continue": token} if token else {}))
            reply = yield from self.read(f"{key}-{n}", words, f"{self.namespaced}/pods?{query}")
            if reply.status == EXPIRED and token and expired < TRIES_MAX - 1:  # the rest would be of another time
                found, token, expired = [], "", expired + 1
                continue
            value = read_object(reply, words)
            items, metadata = value.get("items"), value.get("metadata")
            if not isinstance(items, list) or not isinstance(metadata, dict):
                raise ActuatorError(f"{words}: the answer is no list")
            found += [self._pod_of(item) for item in items]
            token = str(metadata.get("continue") or "")
            if not token:
                return found
        raise AssertionError

    def _pod_of(self, value: Any) -> Pod:
        """Raises ActuatorError: it is no pod."""
        try:
            metadata, spec, status = value["metadata"], value.get("spec") or {}, value.get("status") or {}
            container = self._config.container or spec["containers"][0]["name"]
            started = [
                _seconds(state["running"]["startedAt"])
                for c in status.get("containerStatuses") or ()
                if c["name"] == container and "running" in (state := c.get("state") or {})
            ]
            owners = [o["kind"] for o in metadata.get("ownerReferences") or () if o.get("controller")]
            return Pod(
                name=_text(metadata["name"]),
                uid=_text(metadata["uid"]),
                node=str(spec.get("nodeName") or ""),
                phase=str(status.get("phase") or ""),
                started_at=started[0] if started else 0.0,
                deleting=bool(metadata.get("deletionTimestamp")),
                owner=str(owners[0]) if owners else "",
                labels={str(k): str(v) for k, v in (metadata.get("labels") or {}).items()},
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
            raise ActuatorError(f"the API server's answer is no pod: {plain(repr(e), 200)}") from None

    # --- what they are for --------------------------------------------------------------------------------------------

    def wait_until_gone(
        self, pods: Sequence[Pod], seconds: float | None = None
    ) -> Generator[Call, Reply, tuple[str, ...]]:
        """Looks until no pod with one of these UIDs is left, or for about `seconds`. Returns the names of those left.
        Raises ActuatorError: a pod may not be read."""
        left, waited, n = list(pods), 0.0, 0
        while left and (seconds is None or waited < seconds):
            after = POLL_SECONDS[min(n, len(POLL_SECONDS) - 1)]
            reply = yield self.call(
                f"gone-{n}",
                f"read whether pod {left[0].name} is gone",
                "GET",
                f"{self.namespaced}/pods/{quote(left[0].name, safe='')}",
                assumed=Reply(status=GONE),
                after_seconds=after,
            )
            waited, n = waited + after, n + 1
            if reply.status == GONE:
                left = left[1:]
            elif not reply.unavailable:
                now = self._pod_of(read_object(reply, f"read pod {left[0].name}"))
                if now.uid != left[0].uid or now.ended:
                    left = left[1:]
        return tuple(p.name for p in left)

    def also_hit(self, order: Order, template: str) -> list[str]:
        """Other replicas that end: those in the same pods (`in_the_same_pods`), and, where NVSentinel drains the node,
        all with processes there."""
        hit = in_the_same_pods(order, template)
        if order.leave_node and self._config.cordon_by == "nvsentinel":
            hit += [m.label for m in order.others if m.node == order.node]
        return sorted({*hit})

    def cordon(self, node: str, order: Order) -> Generator[Call, Reply, str]:
        """What was done, to be added to a sentence. Raises ActuatorError: the node is not cordoned."""
        if self._config.cordon_by == "nvsentinel":
            return (yield from self._request_maintenance(node, order))
        reply = Reply(status=NOT_SENT)
        for n in range(TRIES_MAX):
            version, cordoned = yield from self._node(f"node-{n}", node)
            if cordoned:
                return f"; node {node} is cordoned"
            reply = yield self.call(
                f"cordon-{n}",
                f"cordon node {node}",
                "PATCH",
                _path_of_node(node),
                body={
                    "metadata": {"resourceVersion": version, "annotations": {ANNOTATION: _because(order)}},
                    "spec": {"unschedulable": True},
                },
                content_type=MERGE_PATCH,
                prepares=True,
            )
            if reply.status == 200:
                return f"; node {node} is cordoned"
            if reply.status != CONFLICT and not reply.unavailable:
                break
        raise ActuatorError(f"node {node} was not cordoned, and nothing was ended: {said(reply)}")

    def cordoned_before(self, order: Order) -> Generator[Call, Reply, str]:
        """As `cordon`, for an order that a watch has begun, and whose processes on the node are gone by now: they were
        ended, or NVSentinel has drained it, and the replica's processes on other nodes are left. Raises ActuatorError:
        it is not cordoned."""
        if self._config.cordon_by != "nvsentinel":
            return "; its node was cordoned before"  # nothing was ended before that
        _, cordoned = yield from self._node("left-node", order.node)
        if not cordoned:
            raise ActuatorError(f"no rank of {order.replica} is on {order.node}, which it should leave")
        return f"; node {order.node} is cordoned"

    def _node(self, key: str, node: str) -> Generator[Call, Reply, tuple[str, bool]]:
        """Its resource version, and whether it is cordoned. Raises ActuatorError: it cannot be read."""
        words = f"read node {node}"
        value = read_object((yield from self.read(key, words, _path_of_node(node))), words)
        metadata, spec = value.get("metadata"), value.get("spec") or {}
        if not isinstance(metadata, dict) or not isinstance(spec, dict) or metadata.get("name") != node:
            raise ActuatorError(f"{words}: the answer is another object")
        if not metadata.get("resourceVersion"):
            raise ActuatorError(f"{words}: the answer has no resource version")
        return str(metadata["resourceVersion"]), bool(spec.get("unschedulable"))

    def _request_maintenance(self, node: str, order: Order) -> Generator[Call, Reply, str]:
        """Has NVSentinel cordon the node, and waits until it is. The name of the request is that of the order, so that
        a second one for it does nothing. Raises ActuatorError: the node is not cordoned."""
        if node != order.node:
            raise ActuatorError(
                f"NVSentinel drains whole nodes, and what runs on {node} is not known: its agent is named {order.node}"
            )
        _, cordoned = yield from self._node("node-0", node)
        if cordoned:
            return f"; node {node} is cordoned"
        name = f"rolecall-{hashlib.sha256(order.key.encode()).hexdigest()[:16]}"
        reply = Reply(status=NOT_SENT)
        for n in range(TRIES_MAX):
            reply = yield self.call(
                f"maintenance-{n}",
                f"ask NVSentinel to cordon and drain node {node}",
                "POST",
                MAINTENANCE_REQUESTS,
                body=maintenance_request(name, node, _because(order)),
                assumed=Reply(status=201, text="{}"),
                after_seconds=float(n),
            )
            if not reply.unavailable:
                break
        if reply.status not in (200, 201, CONFLICT):  # 409: it was created before
            raise ActuatorError(f"NVSentinel was not asked to cordon node {node}, and nothing was ended: {said(reply)}")
        waited, n = 0.0, 0
        yes = json.dumps({"metadata": {"name": node, "resourceVersion": "0"}, "spec": {"unschedulable": True}})
        try:
            while waited < CORDON_SECONDS:
                after = POLL_SECONDS[min(n, len(POLL_SECONDS) - 1)]
                reply = yield self.call(
                    f"cordoned-{n}",
                    f"read whether node {node} is cordoned",
                    "GET",
                    _path_of_node(node),
                    assumed=Reply(status=200, text=yes),
                    after_seconds=after,
                )
                spec = (reply.json or {}).get("spec") if isinstance(reply.json, dict) else None
                if reply.status == 200 and isinstance(spec, dict) and spec.get("unschedulable"):
                    return f"; NVSentinel has cordoned node {node} for MaintenanceRequest {name}, and drains it"
                waited, n = waited + after, n + 1
            why = yield from self._why_not(name)
            raise ActuatorError(
                f"NVSentinel has not cordoned node {node} within {CORDON_SECONDS:g} s, and nothing was ended{why}"
            )
        except ActuatorError as e:
            raise ActuatorError(
                f"{e}; NVSentinel may still cordon node {node}: delete MaintenanceRequest {name} to withdraw it"
            ) from None

    def _why_not(self, name: str) -> Generator[Call, Reply, str]:
        """What the request's condition says; empty: nothing."""
        reply = yield self.call(
            "maintenance-said", f"read MaintenanceRequest {name}", "GET", f"{MAINTENANCE_REQUESTS}/{name}"
        )
        status = (reply.json or {}).get("status") if isinstance(reply.json, dict) else None
        conditions = status.get("conditions") if isinstance(status, dict) else None
        for one in conditions if isinstance(conditions, list) else ():
            if isinstance(one, dict) and one.get("type") == "HealthEventEmitted" and one.get("status") != "True":
                return plain(f": {one.get('reason', '')}: {one.get('message', '')}", 300)
        return ""


def maintenance_request(name: str, node: str, because: str) -> dict[str, Any]:
    """NVSentinel's resource by which others ask it to cordon and drain a node (its ADR-051). `NONE`: after the drain
    nothing more is done, and the node stays cordoned until the request is deleted."""
    return {
        "apiVersion": NVSENTINEL,
        "kind": "MaintenanceRequest",
        "metadata": {"name": name},
        "spec": {
            "healthEvent": {
                "version": 1,
                "agent": "rolecall",
                "componentClass": "Node",
                "checkName": "RolecallNodeFault",
                "nodeName": node,
                "isHealthy": False,
                "isFatal": False,
                "recommendedAction": "NONE",
                "message": because,
            }
        },
    }


def _path_of_node(node: str) -> str:
    return f"/api/v1/nodes/{quote(node, safe='')}"


def _because(order: Order) -> str:
    return plain(f"{order.incident_id}: {order.because}", ANNOTATION_CHARACTERS)


def pods_of_members(order: Order, pods: Sequence[Pod], where: str) -> dict[str, Pod]:
    """Node of a member -> the pod that holds it, of those that `where` names. Raises ActuatorError: a member has none,
    or one of several; HasEnded: its pod is gone."""
    found: dict[str, Pod] = {}
    for member in order.members:
        words = f"rank {member.rank} of {order.replica}#{order.incarnation} on {member.node}"
        if member.pod_uid:
            pod = next((p for p in pods if p.uid == member.pod_uid and not p.ended), None)
            if pod is None:
                raise HasEnded(f"{words} is in the pod with UID {member.pod_uid}, and no pod of {where} has that")
            _keep(found, member, pod, order)
            continue
        if member.registered_at <= 0:
            raise ActuatorError(f"it is not known since when {words} runs")
        here = [p for p in pods if not p.ended and member.node in (p.name, p.node)]
        if not here:
            raise ActuatorError(f"no pod of {where} holds {words}")
        if len(here) > 1:
            raise ActuatorError(f"cannot tell which pod holds {words}: {', '.join(sorted(p.name for p in here))}")
        (pod,) = here
        if not 0 < pod.started_at <= member.registered_at + CLOCKS_DIFFER_SECONDS:
            state = "started after it" if pod.started_at else f"is {pod.phase or 'in no phase'}"
            raise HasEnded(f"pod {pod.name} (UID {pod.uid}) does not hold {words}: it {state}")
        _keep(found, member, pod, order)
    return found


def order_left(order: Order, pods: Sequence[Pod], where: str) -> Order:
    """The order for those of its members whose pods are still there, after each of them was found once. Raises
    ActuatorError: of a member it cannot be told; HasEnded: none is left."""
    left, gone = list[Member](), list[str]()
    for member in order.members:
        try:
            pods_of_members(replace(order, members=(member,)), pods, where)
        except ActuatorError as e:
            if not isinstance(e, HasEnded) and any(member.node in (p.name, p.node) for p in pods if not p.ended):
                raise
            gone.append(str(e))
        else:
            left.append(member)
    if not left:
        raise HasEnded(gone[0])
    return replace(order, members=tuple(left))


def _keep(found: dict[str, Pod], member: Member, pod: Pod, order: Order) -> None:
    """Raises ActuatorError: the node has another pod of the replica, too."""
    if found.setdefault(member.node, pod) != pod:
        raise ActuatorError(f"ranks of {order.replica} on {member.node} are in several pods")


def in_the_same_pods(order: Order, template: str) -> list[str]:
    """Other replicas with processes on the same nodes, but those that are known to be in other pods there, or for which
    `template` (a name or selector) stands for other pods. It says nothing of other roles unless it names the role."""
    names_role = "{role" in template
    pods: dict[str, set[str]] = {}
    named: dict[str, set[str]] = {}
    for member in order.members:
        pods.setdefault(member.node, set()).add(member.pod_uid)
        named.setdefault(member.node, set()).add(filled(template, member))
    hit = set[str]()
    for other in order.others:
        mine = pods.get(other.node)
        if mine is None:
            continue
        if "" not in {other.pod_uid, *mine}:
            hit |= {other.label} if other.pod_uid in mine else set()
            continue
        comparable = names_role or split_replica(other.replica)[0] == order.role
        as_mine = other if comparable else replace(other, replica=order.replica)
        if filled(template, as_mine) in named[other.node]:
            hit.add(other.label)
    return sorted(hit)


def read_object(reply: Reply, words: str) -> dict[str, Any]:
    """Raises ActuatorError: it was not read."""
    value = reply.json
    if reply.status != 200 or not isinstance(value, dict):
        raise ActuatorError(f"{words}: {said(reply)}")
    return value


def said(reply: Reply) -> str:
    """The message of an API server's `Status`, or the answer itself."""
    value = reply.json
    if isinstance(value, dict) and isinstance(value.get("message"), str):
        return f"status {reply.status}: {plain(value['message'], 300)}"
    return reply.shown


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _text(value: Any) -> str:
    """Raises ValueError: it is no text, or empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected a text, got {value!r}")
    return value
