"""Kubernetes: cordons the node where the fault stays, and evicts the pods of a replica by name and UID.

The Eviction API keeps to disruption budgets, and, with the UID as a precondition, never ends another pod that has got
the name meanwhile. The pods' controller makes others.
"""

from collections.abc import Generator, Sequence
from itertools import count
from urllib.parse import quote

from rolecall.core.config.actuators import KubernetesActuator
from rolecall.core.diagnosis import ActionKind
from rolecall.core.errors import ActuatorError
from rolecall.recovery.actuators.calls import TOO_MANY, Call, Procedure, Reply
from rolecall.recovery.actuators.targets.kubernetes_api import (
    CONFLICT,
    GONE,
    TRIES_MAX,
    KubernetesApi,
    Pod,
    order_left,
    pods_of_members,
    said,
)
from rolecall.recovery.actuators.targets.target import HasEnded, Order, filled

BUDGET_SECONDS = 5.0
"""Before the next attempt when a disruption budget does not allow an eviction now."""


class Kubernetes:
    name = "kubernetes"

    def __init__(self, config: KubernetesActuator) -> None:
        self._config, self._api = config, KubernetesApi(config)
        move = {ActionKind.REPLACE_NODE} if config.cordon else set()
        self.supports = frozenset({ActionKind.REPLACE_REPLICA, *move})

    def also_hit(self, order: Order) -> Sequence[str]:
        return self._api.also_hit(order, self._config.pod or self._config.selector)

    def replace(self, order: Order) -> Procedure:
        if not order.members:
            if order.begun:
                return f"{order.replica}#{order.incarnation} has ended"
            raise ActuatorError(f"no process of {order.replica}#{order.incarnation} is seen: nothing to evict")
        try:
            by_node = yield from self._find(order)
        except HasEnded as e:
            if order.begun:
                return f"{order.replica}#{order.incarnation} has ended: {e}"
            raise
        pods = sorted({p.uid: p for p in by_node.values()}.values(), key=lambda p: p.name)
        for pod in pods:
            if not pod.owner:
                raise ActuatorError(f"pod {pod.name} has no controller that would make another one")
            if order.leave_node and pod.owner == "DaemonSet":
                raise ActuatorError(f"pod {pod.name} is of a DaemonSet, which would start it on the same node")
        done = ""
        if order.leave_node and order.begun and order.node not in by_node:
            done = yield from self._api.cordoned_before(order)
        elif order.leave_node:
            if order.node not in by_node:
                raise ActuatorError(f"no rank of {order.replica} is on {order.node}, which it should leave")
            done = yield from self._api.cordon(by_node[order.node].node, order)
        evicted: list[Pod] = []
        try:
            for pod in pods:
                yield from self._evict(pod)
                evicted.append(pod)
            yield from self._api.wait_until_gone(evicted)
        except ActuatorError as e:
            before = f"; evicted before: {', '.join(p.name for p in evicted)}" if evicted else ""
            raise ActuatorError(f"{e}{done}{before}") from None
        return f"evicted {', '.join(p.name for p in evicted)}{done}"

    def _find(self, order: Order) -> Generator[Call, Reply, dict[str, Pod]]:
        """As `pods_of_members`. Of an order that was begun some members may be gone with their pods."""
        found: list[Pod] = []
        if self._config.selector:
            names = sorted({filled(self._config.selector, m) for m in order.members})
            where = f"{self._config.namespace} with {' or '.join(names)}"
            for n, selector in enumerate(names):
                found += yield from self._api.pods(f"pods-{n}", selector)
        else:
            names = sorted({filled(self._config.pod, m) for m in order.members})
            where = f"{', '.join(names)} in {self._config.namespace}"
            for n, name in enumerate(names):
                pod = yield from self._api.pod(f"pod-{n}", name)
                if pod is not None:
                    found.append(pod)
                elif not order.begun:
                    raise HasEnded(f"there is no pod {name} in {self._config.namespace}")
        return pods_of_members(order_left(order, found, where) if order.begun else order, found, where)

    def _evict(self, pod: Pod) -> Generator[Call, Reply, None]:
        """Returns once the eviction is accepted, or the pod is gone. Raises ActuatorError: it is refused."""
        if pod.deleting:
            return
        failures, after = 0, 0.0
        for n in count():
            reply = yield self._api.call(
                f"evict-{pod.uid}-{n}",
                f"evict pod {pod.name}",
                "POST",
                f"{self._api.namespaced}/pods/{quote(pod.name, safe='')}/eviction",
                body={
                    "apiVersion": "policy/v1",
                    "kind": "Eviction",
                    "metadata": {"name": pod.name, "namespace": self._config.namespace},
                    "deleteOptions": {"preconditions": {"uid": pod.uid}},
                },
                assumed=Reply(status=201, text="{}"),
                after_seconds=after,
            )
            if reply.status in (200, 201, GONE):
                return
            if reply.status == TOO_MANY:  # a disruption budget: until the plan's deadline
                after = BUDGET_SECONDS
                continue
            failures += 1
            if failures < TRIES_MAX and reply.status == CONFLICT:
                now = yield from self._api.pod(f"conflict-{pod.uid}-{n}", pod.name)
                if now is None or now.uid != pod.uid:
                    return
            elif failures >= TRIES_MAX or not reply.unavailable:
                raise ActuatorError(f"pod {pod.name} was not evicted: {said(reply)}")
            after = float(failures)
        raise AssertionError
