"""What NVSentinel says of a node, as sentences for an incident: read from the Node object, where it is published.

NVSentinel's platform connector sets a condition for each check that found a fatal fault, with status True until it is
healthy again; its fault-quarantine cordons the node and leaves labels and annotations. Faults that are not fatal are
Kubernetes events, which are not read. Nothing is changed: one GET for each node, all of them within one deadline.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.config.watched import NvSentinelConfig
from rolecall.core.http import HttpFailed, request
from rolecall.core.text import os_reason, plain

NODES_MAX = 16
"""Of one incident; those of the first suspects."""
READ_SECONDS = 10.0
"""For all nodes of one incident."""
BYTES_MAX = 2 << 20
TEXT_CHARACTERS = 300
CONDITIONS = ("Gpu", "SysLogs", "NVSwitch", "Nvswitch", "DCGMError", "CSPMaintenance", "SyslogError")
"""What types of NVSentinel's conditions begin with. Another program's condition of such a name is told as its own."""
QUARANTINE_EVENT = "quarantineHealthEvent"
QUARANTINE_CORDONED = "quarantineHealthEventIsCordoned"
STATE_LABEL = "dgxc.nvidia.com/nvsentinel-state"
NAME = "NVSentinel"


class NodeHealth(NamedTuple):
    """`statements`: one for each fact. `missing`: nodes that could not be read, and why."""

    statements: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


class NvSentinelHealth:
    """Reads the nodes of one incident. For any thread; never raises."""

    def __init__(self, config: NvSentinelConfig, clock: Clock | None = None) -> None:
        self._config, self._clock = config, clock or SystemClock()

    def __call__(self, nodes: Sequence[str], seconds: float = READ_SECONDS) -> NodeHealth:
        """Returns within `seconds`: nodes that could not be read until then are missing."""
        statements, missing = list[str](), list[str]()
        until = self._clock.monotonic() + seconds
        for n, node in enumerate(nodes[:NODES_MAX]):
            rest = f"what {NAME} says of {', '.join(nodes[n:NODES_MAX])}"
            left = until - self._clock.monotonic()
            if left <= 0:
                missing.append(f"{rest}: not read within {seconds:g} s")
                break
            try:
                value = self._read(node, min(left, self._config.call_seconds))
                statements += told(node, value, self._config.label_prefix)
            except HttpFailed as e:  # the next node's request would wait as long
                missing.append(f"{rest}: {e}")
                break
            except ValueError as e:
                missing.append(f"what {NAME} says of {node}: {e}")
        return NodeHealth(tuple(statements), tuple(missing))

    def _read(self, node: str, seconds: float) -> Mapping[str, Any]:
        """The Node object. Raises HttpFailed: no answer; ValueError: no Node, with the reason."""
        config = self._config
        headers = {"Accept": "application/json"}
        if config.token_path:
            try:
                headers["Authorization"] = "Bearer " + Path(config.token_path).read_text(encoding="utf-8").strip()
            except OSError as e:
                raise ValueError(f"{config.token_path}: {os_reason(e)}") from None
            except ValueError:
                raise ValueError(f"{config.token_path} is not text") from None
        try:
            answer = request(
                "GET",
                f"{config.api.rstrip('/')}/api/v1/nodes/{quote(node, safe='')}",
                headers=headers,
                deadline_seconds=seconds,
                bytes_max=BYTES_MAX,
                ca_path=config.ca_path if config.api.startswith("https:") else "",
            )
            value = json.loads(answer.body)
        except OSError as e:
            raise ValueError(f"{e.filename or config.api}: {os_reason(e)}") from None
        except (ValueError, RecursionError):
            raise ValueError("the API server's answer is not JSON") from None
        message = value.get("message", "") if isinstance(value, dict) else ""
        if answer.status != 200:
            raise ValueError(plain(f"status {answer.status}: {message}", TEXT_CHARACTERS))
        if not isinstance(value, dict) or value.get("kind") != "Node":
            raise ValueError("the API server's answer is no Node")
        return value


def told(node: str, value: Mapping[str, Any], label_prefix: str) -> tuple[str, ...]:
    """Sentences about a Node object; none if NVSentinel says nothing against it. A part of another form is left out."""
    metadata, spec, status = (_mapping(value.get(key)) for key in ("metadata", "spec", "status"))
    labels, annotations = _mapping(metadata.get("labels")), _mapping(metadata.get("annotations"))
    found = []
    by, cordoned = labels.get(f"{label_prefix}cordon-by"), spec.get("unschedulable") is True
    if cordoned and (annotations.get(QUARANTINE_CORDONED) == "True" or by == NAME):
        reason, at = labels.get(f"{label_prefix}cordon-reason"), labels.get(f"{label_prefix}cordon-timestamp")
        parts = [f"{NAME} has cordoned {node}", f" at {at}" if at else "", f" by rule {reason}" if reason else ""]
        state = labels.get(STATE_LABEL)
        found.append("".join(parts) + (f"; its state is {state}" if state else ""))
    elif QUARANTINE_EVENT in annotations:
        found.append(f"{NAME} has quarantined {node}, which is {'cordoned' if cordoned else 'not cordoned'}")
    found += [f"{NAME} says of {node}: {text}" for text in _conditions(status.get("conditions"))]
    return tuple(plain(text, TEXT_CHARACTERS) for text in found)


def _conditions(value: Any) -> Iterator[str]:
    for one in value if isinstance(value, list) else ():
        kind = one.get("type") if isinstance(one, dict) else None
        if isinstance(kind, str) and kind.startswith(CONDITIONS) and one.get("status") == "True":
            since, text = one.get("lastTransitionTime"), one.get("message") or one.get("reason") or "no message"
            yield f"{kind}{f' since {since}' if since else ''}: {text}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
