"""Faults of a node's hardware and kernel, folded from its agent's events: XIDs, lost GPUs, links that are down,
unresponsive drivers.

XIDs caused by the application (such as 13 or 31, resolved by a process restart) are no fault of the node. Pure; the
detector names the node for a fault that stands, and the agent tells NVRx of it.
"""

from dataclasses import dataclass, field

from rolecall.core.faults import FaultClass
from rolecall.core.telemetry import AgentEvent, AgentEventKind
from rolecall.formats.xid.nvlink import LINE_DECIDES
from rolecall.formats.xid.xid import RecoveryAction, xid

STANDS_SECONDS = 600.0
"""An XID ends when it is not reported again for this long. A condition with an explicit end (a link, a driver) stands
until that end, or expires like an XID if its agent restarts without reporting it again."""
FLAP_SECONDS = 2.0
"""A link that recovers within this time is only counted (`rolecall_link_changes_total`): RDMA retries for longer."""
STALE_SECONDS = 60.0
"""Older events are ignored: a starting agent reports the existing kernel log, and a starting watcher receives the
events that its agents keep."""
FAULTS_MAX = 256
EVIDENCE_MAX = 8

RECOVERY = 154
"""The XID with which the driver requests a recovery action for a GPU."""
HELD_SECONDS = 2.0
"""NVML reports the number of an XID within milliseconds; the kernel log line follows within 0.2 s and decides whether
an NVLink code is fatal. Equal to `xid_merger.SAME_SECONDS` of the agent."""

REPORTED_ONCE = frozenset({"ecc"})
"""GPU faults that are momentary events; all others are conditions whose end is reported, too."""
GPU_PROBES = ("gpu", "gpu_events")
HANGS = "hangs"
"""Substring of the agent's reason for a probe whose read does not return (agent/collectors/runner.py)."""


@dataclass(slots=True)
class NodeFault:
    """A fault of one component of a node. Times in wall seconds; `ended` is 0 while it stands."""

    node: str
    thing: str  # `gpu 3`, `link mlx5_0/1`, `driver`
    gpu: int | None
    fault_class: str
    onset: float
    last: float
    because: str
    advice: str
    lasts: bool  # a condition: stands until its end is reported
    lines: list[str] = field(default_factory=list)
    ended: float = 0.0
    held_until: float = 0.0  # not reported before: the kernel log line may still withdraw it
    explained_at: float = 0.0  # onset of the newest crash or hang of which it was reported as the cause; 0: of none


class NodeFaults:
    """Those of several nodes. Events of a node come in their order."""

    def __init__(self) -> None:
        self.state: dict[str, NodeFault] = {}  # by node and component

    def take(self, event: AgentEvent, now: float, age: float = 0.0) -> None:
        """Processes one agent event, with its time on the watcher's clock. `now`: wall seconds; `age`: seconds since it
        was written."""
        # A momentary event, not a condition that may persist, as a requested recovery (XID 154) is.
        momentary = event.kind is AgentEventKind.XID and not event.detail.get("recovery")
        momentary |= event.kind is AgentEventKind.GPU_FAULT and event.detail.get("what") in REPORTED_ONCE
        if _age(event) > STALE_SECONDS or (age > STALE_SECONDS and momentary):
            return
        match event.kind:
            case AgentEventKind.XID:
                self._take_xid(event, now)
            case AgentEventKind.GPU_LOST:
                gpu = event.detail.get("gpu", "")
                because = f"GPU {gpu} of {event.node} is lost: the driver no longer answers calls for it"
                advice = "drain the node and reboot it; if the GPU does not come back, have it inspected"
                self._note(event, now, f"gpu {gpu}", FaultClass.GPU, because, advice, lasts=True)
            case AgentEventKind.GPU_FAULT:
                gpu, what = event.detail.get("gpu", ""), event.detail.get("what", "")
                words = " ".join(
                    f"{k}={v}" for k, v in sorted(event.detail.items()) if k not in ("gpu", "uuid", "what")
                )
                because = f"GPU {gpu} of {event.node} reports {what.replace('_', ' ')}: {words}"
                advice = event.detail.get("advice") or "drain the GPU and follow its driver's request"
                lasts = what not in REPORTED_ONCE
                self._note(event, now, f"gpu {gpu}", FaultClass.GPU, because, advice, lasts=lasts)
            case AgentEventKind.GPU_RECOVERED:
                self._end(event, f"gpu {event.detail.get('gpu', '')}", now)
            case AgentEventKind.LINK_DOWN:
                because = f"{_link(event)} of {event.node} is down"
                self._note(event, now, _link(event), FaultClass.NETWORK, because, "check cable and port", lasts=True)
            case AgentEventKind.LINK_UP:
                self._end(event, _link(event), now)
            case AgentEventKind.PROBE_DOWN if HANGS in event.detail.get("reason", ""):
                self._take_hang(event, now)
            case AgentEventKind.PROBE_UP:
                self._end(event, f"probe {event.detail.get('probe', '')}", now)
            case AgentEventKind.AGENT_STARTED:
                self._restart(event, now, age)

    def _take_xid(self, event: AgentEvent, now: float) -> None:
        detail = event.detail
        if detail.get("sxid"):
            if detail.get("fatal") == "yes":
                device, meaning = detail.get("device", "NVSwitch"), detail.get("meaning", "")
                because = f"SXid {detail['sxid']} of {device} of {event.node}: {meaning}"
                self._note(event, now, device, FaultClass.NETWORK, because, detail.get("advice", ""), lasts=False)
            return
        text = detail.get("xid", "")
        if not (text.isascii() and text.isdecimal() and len(text) < 6):
            return
        code = xid(int(text))
        if code.code == RECOVERY and detail.get("recovery"):
            self._take_verdict(event, now)
            return
        # For NVLink codes the log line determines whether it is fatal; the agent reports that.
        fatal = code.fatal and detail.get("fatal", "yes") == "yes"
        key = f"{event.node} gpu {detail.get('gpu', '')}"
        held = self.state.get(key)
        based_on_number = held is not None and held.held_until and held.because.startswith(f"XID {code.code} ")
        if detail.get("adds_to") and not fatal and based_on_number:
            del self.state[key]  # the kernel log line shows that it is not fatal
        if not fatal or not code.fault_class.spec.is_hardware:
            return
        where = detail.get("gpu") or detail.get("pci", "")
        part = detail.get("gpu_instance", "")
        because = (
            f"XID {code.code} on GPU {where}{f' (MIG instance {part})' if part else ''} of {event.node}: {code.meaning}"
        )
        advice = detail.get("advice") or code.advice
        known = self._note(event, now, f"gpu {where}", code.fault_class, because, advice, lasts=False)
        if known is None:
            return
        if code.code in LINE_DECIDES and detail.get("source") == "nvml":
            known.held_until = now + HELD_SECONDS if len(known.lines) == 1 else known.held_until
        else:
            known.held_until = 0.0

    def _take_verdict(self, event: AgentEvent, now: float) -> None:
        """Recovery action requested by the driver. It stands until the driver withdraws it."""
        recovery = event.detail["recovery"]
        where = event.detail.get("gpu") or event.detail.get("pci", "")
        if recovery == RecoveryAction.NONE:
            self._end(event, f"gpu {where}", now)
            return
        because = f"the driver of GPU {where} of {event.node} requests recovery: {recovery.replace('_', ' ')}"
        self._note(event, now, f"gpu {where}", FaultClass.GPU, because, event.detail.get("advice", ""), lasts=True)

    def _take_hang(self, event: AgentEvent, now: float) -> None:
        probe, reason = event.detail["probe"], event.detail["reason"]
        if probe in GPU_PROBES:
            because = (
                f"the GPU driver of {event.node} does not answer: {reason}; typical of a GPU that fell off the bus"
            )
            advice = "check the kernel log and nvidia-smi; reboot the node if both hang"
            self._note(event, now, f"probe {probe}", FaultClass.GPU, because, advice, lasts=True)
        else:
            because = f"the agent of {event.node} cannot read its {probe}: {reason}"
            self._note(event, now, f"probe {probe}", FaultClass.CONTROL_PLANE, because, "inspect the node", lasts=True)

    def _note(
        self, event: AgentEvent, now: float, thing: str, what: FaultClass, because: str, advice: str, *, lasts: bool
    ) -> NodeFault | None:
        """The new or continued fault; None if the limit is reached."""
        known = self.state.get(f"{event.node} {thing}")
        if known is None or known.ended:
            if known is None and len(self.state) >= FAULTS_MAX:
                return None
            gpu = thing.removeprefix("gpu ")
            index = int(gpu) if thing != gpu and gpu.isascii() and gpu.isdecimal() and len(gpu) < 4 else None
            onset = event.wall_at - _age(event)
            known = NodeFault(str(event.node), thing, index, str(what), onset, now, because, advice, lasts)
            self.state[f"{event.node} {thing}"] = known
        known.last, known.lasts = now, known.lasts or lasts
        if len(known.lines) < EVIDENCE_MAX:
            known.lines.append(event.detail.get("line") or because)
        return known

    def _end(self, event: AgentEvent, thing: str, now: float) -> None:
        known = self.state.get(f"{event.node} {thing}")
        if known is not None:
            known.ended = known.ended or min(now, event.wall_at)

    def _restart(self, event: AgentEvent, now: float, age: float) -> None:
        """Handles an agent restart. The new agent does not know earlier reports, and a reboot may have resolved them:
        hung reads ended with the old agent, and conditions that persist are reported again soon."""
        for known in self.state.values():
            if known.node == event.node and known.thing.startswith("probe "):
                known.ended = known.ended or min(now, event.wall_at)
            elif known.node == event.node:
                known.lasts, known.last = False, now - age

    def leave(self, node: str) -> None:
        """Drops the faults of a node that is no longer monitored."""
        self.state = {k: f for k, f in self.state.items() if f.node != node}

    def expire(self, now: float, kept_seconds: float = 0.0) -> None:
        """Ends what was not reported again for too long, and drops what ended more than `kept_seconds` ago."""
        for fault in self.state.values():
            if not fault.lasts and not fault.ended and now - fault.last > STANDS_SECONDS:
                fault.ended = now
        self.state = {k: f for k, f in self.state.items() if not f.ended or now - f.ended <= kept_seconds}

    def standing(self, now: float) -> list[NodeFault]:
        """Faults that are certain and have not ended. Not a link that has just gone down, nor an XID that its kernel
        log line may still withdraw."""
        return [n for n in self.state.values() if not n.ended and not _is_young(n, now) and now >= n.held_until]


def _is_young(fault: NodeFault, now: float) -> bool:
    return fault.thing.startswith("link ") and now - fault.onset < FLAP_SECONDS


def _age(event: AgentEvent) -> float:
    """Seconds between the fault and its event, as reported by the agent."""
    text = event.detail.get("seconds_ago", "")
    return float(text) if len(text) < 12 and text.isascii() and text.isdecimal() else 0.0


def _link(event: AgentEvent) -> str:
    """Name of a port of an InfiniBand device (sysfs) or of a network interface (kernel log or sysfs)."""
    nic, port, interface = (event.detail.get(key, "") for key in ("nic", "port", "interface"))
    return f"link {nic}/{port}" if nic and port else f"link {interface or nic or '?'}"
