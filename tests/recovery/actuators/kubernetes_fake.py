"""An API server of Kubernetes in memory, with KubeRay's operator and NVSentinel: what the targets use of them, by their
documentation.

Objects have resource versions; a change with an old one is a conflict, and a JSON patch whose test fails is refused.
Evictions check the UID. Pods have controllers that make others: with the same name (`StatefulSet`), or with a new one.
Everything that it holds, gets and answers is valid by the published schemas (kubernetes_schemas.py): a request with a
field that they do not know is refused, as with `fieldValidation=Strict`, and so are wrong media types and selectors.
"""

import functools
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from rolecall.recovery.actuators.calls import Call, HttpCall, Reply
from tests.recovery.actuators.driving import NOW
from tests.recovery.actuators.kubernetes_schemas import RAY, problems, selector_problem

NAMESPACE = "rl"
Answer = tuple[int, dict[str, Any]]
MEDIA_TYPES = {
    "POST": {"application/json"},
    "PATCH": {
        "application/json-patch+json",
        "application/merge-patch+json",
        "application/strategic-merge-patch+json",
        "application/apply-patch+yaml",
    },
}
_MERGE, _JSON = "application/merge-patch+json", "application/json-patch+json"
_REASONS = {
    400: "BadRequest",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
}


def status(code: int, message: str) -> Answer:
    failed = {"status": "Failure", "message": message, "reason": _REASONS.get(code, ""), "code": code}
    return code, {"kind": "Status", "apiVersion": "v1", "metadata": {}, **failed}


class _Refused(Exception):
    """`args`: code and message of the answer."""


def _checked(value: dict[str, Any]) -> dict[str, Any]:
    """Raises AssertionError: no API server would hold or answer this."""
    assert not _problems(value), (_problems(value), value)
    return value


def _problems(value: dict[str, Any]) -> tuple[str, ...]:
    """`problems`, once for all objects that differ in digits only: tests of thousands of cases make as many."""
    return _problems_of_shape(re.sub(r"\d", "1", json.dumps(value, sort_keys=True)))


@functools.cache
def _problems_of_shape(text: str) -> tuple[str, ...]:
    return tuple(problems(json.loads(text)))


class FakeKubernetes:
    """`ended`: UIDs of pods in the order of their ends; `cordoned`: nodes. `budget`: evictions refused before one is
    allowed. `stuck`: pods never vanish (a dead node). `expired`: pages that come too late. `nvsentinel`: what becomes of a MaintenanceRequest: `cordons` its
    node, `drains` it, too, is `blocked` by another one, or is refused, being `disabled`; empty: not installed."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.nodes: dict[str, dict[str, Any]] = {}
        self.clusters: dict[str, dict[str, Any]] = {}
        self.ended: list[str] = []
        self.cordoned: list[str] = []
        self.asked: list[tuple[str, str, str]] = []  # (verb, API group, resource) as RBAC has them
        self.forbidden: set[str] = set()  # resources
        self.budget = 0
        self.stuck = False
        self.expired = 0
        self.nvsentinel = ""
        self.maintenance: dict[str, dict[str, Any]] = {}
        self._numbers = itertools.count(1)

    # --- what there is ------------------------------------------------------------------------------------------------

    def node(self, name: str) -> None:
        self.nodes[name] = _checked(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": name, "uid": f"uid-{next(self._numbers)}", "resourceVersion": self._version()},
                "spec": {},
                "status": {"conditions": [{"type": "Ready", "status": "True"}]},
            }
        )

    def pod(
        self,
        name: str,
        node: str,
        *,
        started_at: float = NOW - 60,
        owner: str = "StatefulSet",
        labels: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Returns it; the latest one of the name."""
        if node not in self.nodes:
            self.node(node)
        started = datetime.fromtimestamp(started_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        owns = {"apiVersion": "apps/v1", "kind": owner, "name": "o", "uid": "uid-o", "controller": True}
        containers = [{"name": "main", "image": "job:1"}, {"name": "sidecar", "image": "agent:1"}]
        begun = {"main": started, "sidecar": "2020-01-01T00:00:00Z"}
        value = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": NAMESPACE,
                "uid": f"uid-{next(self._numbers)}",
                "resourceVersion": self._version(),
                "ownerReferences": [owns] if owner else [],
                "labels": labels or {},
            },
            "spec": {"nodeName": node, "containers": containers},
            "status": {
                "phase": "Running",
                "containerStatuses": [
                    {
                        **one,
                        "imageID": "sha256:1",
                        "ready": True,
                        "restartCount": 0,
                        "state": {"running": {"startedAt": begun[one["name"]]}},
                    }
                    for one in reversed(containers)
                ],
            },
        }
        self.pods[name] = _checked(value)
        self._pods_changed()
        return value

    def cluster(self, name: str, *groups: dict[str, Any], **spec: Any) -> dict[str, Any]:
        head = {"rayStartParams": {}, "template": {"spec": {"containers": [{"name": "ray", "image": "ray:1"}]}}}
        self.clusters[name] = _checked(
            {
                "apiVersion": RAY,
                "kind": "RayCluster",
                "metadata": {"name": name, "namespace": NAMESPACE, "resourceVersion": self._version()},
                "spec": {"headGroupSpec": head, "workerGroupSpecs": list(groups), **spec},
            }
        )
        return self.clusters[name]

    def uid(self, name: str) -> str:
        return str(self.pods[name]["metadata"]["uid"])

    def replace_pod(self, name: str) -> str:
        """Its controller ends it and makes another one that starts now. Returns the name of that."""
        old = self.pods.pop(name)
        owner = (old["metadata"]["ownerReferences"] or [{"kind": ""}])[0]["kind"]
        again = name if owner == "StatefulSet" else f"{name[:20]}-{next(self._numbers)}"
        self.pod(again, old["spec"]["nodeName"], started_at=NOW + 60, owner=owner, labels=old["metadata"]["labels"])
        return again

    # --- the API ------------------------------------------------------------------------------------------------------

    def reply(self, call: Call) -> Reply:
        assert isinstance(call, HttpCall)
        url = urlsplit(call.url)
        code, value = self.handle(call.method, url.path, url.query, call.content_type, call.body)
        return Reply(status=code, text=json.dumps(value))

    def handle(self, method: str, path: str, query: str, content_type: str, body: Any) -> Answer:
        try:
            known = MEDIA_TYPES.get(method)
            if known is not None and content_type not in known:
                return status(415, f"the body of the request was in an unknown format - accepted media types: {known}")
            code, value = self._handle(method, path, query, content_type, body)
        except _Refused as e:
            return status(*e.args)
        return code, _checked(value)

    def _handle(self, method: str, path: str, query: str, content_type: str, body: Any) -> Answer:
        match [unquote(part) for part in path.strip("/").split("/")]:
            case ["api", "v1", "nodes", name] if method in ("GET", "PATCH"):
                self._ask("get" if method == "GET" else "patch", "", "nodes")
                return self._node(method, name, content_type, body)
            case ["api", "v1", "namespaces", namespace, "pods"] if namespace == NAMESPACE and method == "GET":
                self._ask("list", "", "pods")
                given = parse_qs(query, strict_parsing=True)
                assert {"labelSelector"} <= set(given) <= {"labelSelector", "limit", "continue"}
                start, limit = (int(given.get(name, ["0"])[0]) for name in ("continue", "limit"))
                return self._list(given["labelSelector"][0], start, limit)
            case ["api", "v1", "namespaces", namespace, "pods", name] if namespace == NAMESPACE and method == "GET":
                self._ask("get", "", "pods")
                pod = self.pods.get(name)
                return (200, pod) if pod is not None else status(404, f'pods "{name}" not found')
            case ["api", "v1", "namespaces", ns, "pods", name, "eviction"] if ns == NAMESPACE and method == "POST":
                self._ask("create", "", "pods/eviction")
                return self._evict(name, body)
            case ["apis", "ray.io", "v1", "namespaces", ns, "rayclusters", name] if (
                ns == NAMESPACE and method != "POST"
            ):
                self._ask("get" if method == "GET" else "patch", "ray.io", "rayclusters")
                return self._cluster(method, name, content_type, body)
            case ["apis", "nvsentinel.dgxc.nvidia.com", "v1", "maintenancerequests", *names] if self.nvsentinel:
                self._ask("get" if method == "GET" else "create", "nvsentinel.dgxc.nvidia.com", "maintenancerequests")
                if method == "POST" and not names:
                    return self._request_maintenance(body)
                if method == "GET" and len(names) == 1 and names[0] in self.maintenance:
                    return 200, self.maintenance[names[0]]
        return status(404, "the server could not find the requested resource")

    def _request_maintenance(self, body: Any) -> Answer:
        denied = 'admission webhook "vmaintenancerequest-v1.kb.io" denied the request: '
        if self.nvsentinel == "disabled":
            return status(403, f"{denied}MaintenanceRequest controller is disabled")
        _decoded(body)
        name, node = body["metadata"]["name"], body["spec"]["healthEvent"]["nodeName"]
        if name in self.maintenance:
            return status(409, f'maintenancerequests.nvsentinel.dgxc.nvidia.com "{name}" already exists')
        if node not in self.nodes:
            return status(403, f'{denied}spec.healthEvent.nodeName references non-existent node "{node}"')
        emitted = {"type": "HealthEventEmitted", "status": "True", "reason": "Emitted", "message": ""}
        if self.nvsentinel == "blocked":
            locked = f"Node {node} is locked by another maintenance operation."
            emitted.update(status="False", reason="Blocked", message=locked)
        else:
            self.quarantine(node)
        if self.nvsentinel == "drains":
            for pod in [n for n, p in self.pods.items() if p["spec"]["nodeName"] == node]:
                self._end(pod)
        self.maintenance[name] = {**body, "status": {"conditions": [emitted]}}
        return 201, self.maintenance[name]

    def quarantine(self, name: str, *conditions: dict[str, str]) -> None:
        """As NVSentinel's fault-quarantine and platform connector leave the node."""
        node, prefix = self.nodes[name], "k8saas.nvidia.com/cordon-"
        labels = {f"{prefix}by": "NVSentinel", f"{prefix}reason": "GPU-fatal-error-ruleset"}
        labels |= {f"{prefix}timestamp": "2026-11-06T10-00-00Z", "dgxc.nvidia.com/nvsentinel-state": "quarantined"}
        node["metadata"]["labels"] = labels
        node["metadata"]["annotations"] = {"quarantineHealthEvent": "[]", "quarantineHealthEventIsCordoned": "True"}
        node["metadata"]["resourceVersion"] = self._version()
        node["spec"]["unschedulable"] = True
        node["status"]["conditions"] += conditions
        self.cordoned.append(name)
        _checked(node)

    def _ask(self, verb: str, group: str, resource: str) -> None:
        self.asked.append((verb, group, resource))
        if resource in self.forbidden:
            raise _Refused(403, "forbidden")

    def _version(self) -> str:
        return str(next(self._numbers))

    def _node(self, method: str, name: str, content_type: str, body: Any) -> Answer:
        node = self.nodes.get(name)
        if node is None:
            return status(404, f'nodes "{name}" not found')
        if method == "GET":
            return 200, node
        assert content_type == _MERGE
        if body["metadata"]["resourceVersion"] != node["metadata"]["resourceVersion"]:
            return status(409, "the object has been modified; please apply your changes to the latest version")
        changed = _merged(node, body)
        _decoded(changed)
        changed["metadata"]["resourceVersion"] = self._version()
        self.nodes[name] = changed
        if changed["spec"].get("unschedulable") and not node["spec"].get("unschedulable"):
            self.cordoned.append(name)
        return 200, changed

    def _list(self, selector: str, start: int, limit: int) -> Answer:
        """`start`: the continue token, here a place in the list; `limit`: 0: none."""
        if start and self.expired > 0:
            self.expired -= 1
            return status(410, "The provided continue parameter is too old to display a consistent list result.")
        if problem := selector_problem(selector):
            return status(400, problem)
        found = [p for p in self.pods.values() if _selects(selector, p["metadata"]["labels"])]
        # As a real server answers: the items of a list do not repeat their kind.
        end = start + limit if limit else len(found)
        items = [{k: v for k, v in p.items() if k not in ("apiVersion", "kind")} for p in found[start:end]]
        metadata = {"resourceVersion": "1", **({"continue": str(end)} if end < len(found) else {})}
        return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items}

    def _evict(self, name: str, body: Any) -> Answer:
        _decoded(body)
        if (body["apiVersion"], body["kind"]) != ("policy/v1", "Eviction"):
            return status(400, f"{body['apiVersion']} {body['kind']} in the path of an Eviction")
        if body["metadata"].get("name") != name or body["metadata"].get("namespace", NAMESPACE) != NAMESPACE:
            return status(400, "the name of the object does not match the name on the URL")
        pod = self.pods.get(name)
        if pod is None:
            return status(404, f'pods "{name}" not found')
        if body["deleteOptions"]["preconditions"]["uid"] != pod["metadata"]["uid"]:
            return status(409, "Precondition failed: UID in precondition")
        if self.budget > 0:
            self.budget -= 1
            return status(429, "Cannot evict pod as it would violate the pod's disruption budget.")
        self._end(name)
        return 201, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}

    def _end(self, name: str) -> None:
        self.ended.append(self.uid(name))
        if self.stuck:
            self.pods[name]["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
        else:
            self.replace_pod(name)

    def _cluster(self, method: str, name: str, content_type: str, body: Any) -> Answer:
        cluster = self.clusters.get(name)
        if cluster is None:
            return status(404, f'rayclusters.ray.io "{name}" not found')
        if method == "GET":
            return 200, cluster
        if content_type == "application/strategic-merge-patch+json":
            return status(
                415, "the body of the request was in an unknown format: custom resources have no such patches"
            )
        assert content_type == _JSON
        changed = json.loads(json.dumps(cluster))
        for operation in body:
            *parents, last = operation["path"].strip("/").split("/")
            place = changed
            try:
                for parent in parents:
                    place = place[int(parent)] if isinstance(place, list) else place[parent]
                if operation["op"] == "test":
                    if place[last] != operation["value"]:
                        return status(422, "the server rejected our request due to an error in our request")
                else:
                    assert operation["op"] in ("add", "replace") and set(operation) == {"op", "path", "value"}
                    if operation["op"] == "replace":
                        place[last]
                    place[last] = operation["value"]
            except (KeyError, IndexError):
                return status(422, f"no {operation['path']}")
        _decoded(changed)
        changed["metadata"]["resourceVersion"] = self._version()
        self.clusters[name] = changed
        self._reconcile(changed)
        return 200, changed

    def _reconcile(self, cluster: dict[str, Any]) -> None:
        for group in cluster["spec"]["workerGroupSpecs"]:
            for name in (group.get("scaleStrategy") or {}).get("workersToDelete") or ():
                if name in self.pods and "deletionTimestamp" not in self.pods[name]["metadata"]:
                    self._end(name)

    def _pods_changed(self) -> None:
        """KubeRay counts its pods in the status of the RayCluster."""
        for cluster in self.clusters.values():
            cluster["metadata"]["resourceVersion"] = self._version()


def _decoded(value: dict[str, Any]) -> None:
    """Raises _Refused: it is no such object, or has fields that the schema does not know."""
    if wrong := _problems(value):
        raise _Refused(400, f"strict decoding error: {'; '.join(wrong)}")


def _merged(value: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    found = dict(value) if isinstance(value, dict) else {}
    for key, part in patch.items():
        if part is None:
            found.pop(key, None)
        else:
            found[key] = _merged(found.get(key), part)
    return found


def _selects(selector: str, labels: dict[str, str]) -> bool:
    while selector:
        if " in (" in selector.partition(",")[0]:
            key, _, rest = selector.partition(" in (")
            values, _, selector = rest.partition(")")
            selector = selector.removeprefix(",")
            if labels.get(key) not in values.split(","):
                return False
        else:
            term, _, selector = selector.partition(",")
            key, _, value = term.partition("=")
            if labels.get(key) != value:
                return False
    return True


@contextmanager
def served(fake: FakeKubernetes, token: str, delay: Callable[[str], float] = lambda _: 0.0) -> Iterator[str]:
    """The fake behind HTTP on loopback; yields its URL. `delay`: seconds before the answer to a method."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(self._body())

        do_PATCH = do_POST

        def _body(self) -> Any:
            return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

        def _answer(self, body: Any) -> None:
            url = urlsplit(self.path)
            with lock:
                if self.headers["Authorization"] != f"Bearer {token}":
                    code, value = status(401, "Unauthorized")
                else:
                    given = self.headers["Content-Type"] or ""
                    code, value = fake.handle(self.command, url.path, url.query, given, body)
            time.sleep(delay(self.command))
            try:
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(value).encode())
            except OSError:  # the client has given up
                pass

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
