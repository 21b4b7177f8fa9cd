"""Why a worker of Ray ended, from Ray's own logs of its node. Pure: text in, one statement out.

Ray tells all of it as "actor died". Two files of the session's log folder know more (Ray 2.60):

    python-core-worker-<worker>_<pid>.log   `RayletIpcClient::Disconnect, exit_type=..., exit_detail=...`: the worker
                                            says why it ends, unless it is killed; of a failed `__init__` with its
                                            traceback
    raylet.out                              `Selected to kill: (... pid=N ...)` of the memory monitor, after `Memory on
                                            the node ...`; `Killing leased worker because its owner died.`; and why the
                                            raylet itself ends

The GCS's log (gcs_server.out, on the head) knows whether the actor is restarted.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

TEXT_CHARACTERS_MAX = 400


class RayReason(StrEnum):
    RAY_KILL = "ray_kill"  # the job called ray.kill
    OWNER_DIED = "owner_died"
    OUT_OF_SCOPE = "out_of_scope"  # the job dropped its last reference
    LEFT = "left"  # exit_actor()
    TERMINATED = "terminated"  # by SIGTERM
    CREATION_FAILED = "creation_failed"  # its __init__ raised
    EXITED = "exited"  # its own code ended the process: sys.exit, os._exit
    OUT_OF_MEMORY = "out_of_memory"  # of the node, by Ray's memory monitor
    NODE_LOST = "node_lost"  # its raylet ended, and was not asked to
    NODE_STOPPED = "node_stopped"  # its raylet was asked to end, as by `ray stop`
    NO_WORD = "no_word"  # Ray did not end it

    @property
    def is_intended(self) -> bool:
        """Whether the job, or whoever runs it, wanted it, or it follows from the end of another process."""
        return self in (
            *(RayReason.RAY_KILL, RayReason.OWNER_DIED, RayReason.OUT_OF_SCOPE),
            *(RayReason.LEFT, RayReason.TERMINATED, RayReason.NODE_STOPPED),
        )

    @classmethod
    def _missing_(cls, value: object) -> "RayReason":
        return cls.NO_WORD  # of an agent of a later version


@dataclass(frozen=True, slots=True, kw_only=True)
class RayDeath:
    """`text`: the sentence for people, which follows the name of the process; `line`: what Ray's log says."""

    reason: RayReason
    text: str
    line: str = ""


_DISCONNECT = re.compile(r"Disconnect, exit_type=(\w+), exit_detail=(.*)")
_LOST_RAYLET = re.compile(r"because the local raylet failed")
_STAMPED = re.compile(r"^\[\d{4}-\d\d-\d\d ", re.MULTILINE)
_TAIL = re.compile(r", has creation_task_exception_pb_bytes=\d+\s*$")
_COLOUR = re.compile(r"\x1b?\[\d{1,2}m")
_RAISED = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)\b.*)$", re.MULTILINE)
_OWNER = re.compile(r"Owner worker exit type: (\w+)(?: Worker exit detail: (.*))?")
_OWNER_GONE = re.compile(r"Killing leased worker because its owner('s node)? died\. worker_id=(\w+)")
_CREATOR_DIED = "the process that created it has died"
# No pattern begins with a gap, and no gap is long: the job may write to these logs, and one long line took minutes.
_MEMORY = re.compile(r"Memory on the node [^\n]{0,200}?was ([^\n]*)")
_SELECTED = re.compile(r"Selected to kill: [^\n]*")
_THRESHOLD = re.compile(r"OOM kill reason: ([^\n]*)")
_RAYLET_TERM = re.compile(r"received SIGTERM|Raylet graceful shutdown|UnregisterSelf", re.IGNORECASE)
_RAYLET_DEAD = re.compile(r"marked as dead by the GCS|failed to check the health of this node")
_RESTARTS = re.compile(r"Actor is failed on worker (\w+) [^\n]{0,500}?remaining_restarts = (-?\d{1,9})\b")
_WORKER_FILE = re.compile(r"python-core-worker-([0-9a-f]{20,64})_(\d+)\.log")


def worker_of(file_name: str) -> tuple[str, int] | None:
    """(worker ID, PID) of `python-core-worker-<worker>_<pid>.log`."""
    found = _WORKER_FILE.fullmatch(file_name)
    return (found.group(1), int(found.group(2))) if found else None


def death_of(
    worker_log: str,
    raylet_log: str,
    *,
    pid: int,
    raylet_lives: bool,
    raylet_pid: int = 0,
    gcs_log: str = "",
    worker: str = "",
) -> RayDeath:
    """`worker_log`, `raylet_log`, `gcs_log`: the ends of the files; empty: not there. `pid`, `worker`: PID and ID of
    the worker as Ray knows it. `raylet_lives`: whether its raylet still ran when the worker had ended."""
    found = _of_worker(worker_log)
    # A signal of the raylet may be faster than the request of the GCS, and then the worker only tells of a signal.
    if (found is None or found.reason in (RayReason.EXITED, RayReason.TERMINATED)) and worker:
        found = _of_owner(raylet_log, worker) or found
    if found is None:
        found = _of_memory_monitor(raylet_log, pid)
    if found is None and (not raylet_lives or _LOST_RAYLET.search(worker_log)):
        found = _of_raylet(raylet_log, raylet_pid)
    if found is None:
        return RayDeath(
            reason=RayReason.NO_WORD,
            text="Ray did not end it, and its raylet saw only that it was gone: it was killed from outside of Ray, or "
            "crashed",
        )
    restarts = [int(n) for who, n in _RESTARTS.findall(gcs_log) if who == worker]
    if restarts and not found.reason.is_intended:
        again = "Ray does not restart it" if restarts[-1] == 0 else "Ray restarts it"
        return RayDeath(reason=found.reason, text=f"{found.text}; {again}", line=found.line)
    return found


def _of_worker(log: str) -> RayDeath | None:
    matches = list(_DISCONNECT.finditer(log))
    if not matches:
        return None
    last = matches[-1]
    kind, detail = last.group(1), _plain(_TAIL.sub("", last.group(2)))
    reason, text = RayReason.EXITED, f"its own code ended the process: {detail}"
    if "ray.kill" in detail:
        reason, text = RayReason.RAY_KILL, "the job ended it with ray.kill"
    elif "its owner has died" in detail:
        how = _OWNER.search(detail)
        owner = f" ({_sentence(how.group(2) or how.group(1))})" if how else ""
        reason, text = RayReason.OWNER_DIED, f"Ray ended it because {_CREATOR_DIED}{owner}"
    elif "references to the actor were removed" in detail or "out of scope" in detail:
        reason, text = RayReason.OUT_OF_SCOPE, "Ray ended it because the job dropped its last reference to the actor"
    elif kind == "USER_ERROR" or "initialization method" in detail:
        stamped = _STAMPED.search(log, last.end())
        raised = _RAISED.findall(_plain(log[last.end() : stamped.start() if stamped else len(log)], keep_lines=True))
        error = f": {raised[-1].strip()}" if raised else ""
        reason, text = RayReason.CREATION_FAILED, f"its creation failed, because its __init__ raised{error}"
    elif "sigterm" in detail.lower():
        reason, text = RayReason.TERMINATED, "it was asked to end, by SIGTERM"
    elif kind == "INTENDED_USER_EXIT":
        reason, text = RayReason.LEFT, f"it ended itself: {_sentence(detail)}"
    elif kind == "NODE_OUT_OF_MEMORY":
        reason, text = RayReason.OUT_OF_MEMORY, f"Ray's memory monitor ended it: {detail}"
    elif kind == "INTENDED_SYSTEM_EXIT":
        reason, text = RayReason.OUT_OF_SCOPE, f"Ray ended it: {detail}"
    return RayDeath(reason=reason, text=text[:TEXT_CHARACTERS_MAX], line=detail[:TEXT_CHARACTERS_MAX])


def _of_owner(log: str, worker: str) -> RayDeath | None:
    for line in _OWNER_GONE.finditer(log):
        if line.group(2) == worker:
            what = "the node of the process that created it is gone" if line.group(1) else _CREATOR_DIED
            return RayDeath(
                reason=RayReason.OWNER_DIED,
                text=f"Ray ended it because {what}",
                line=_plain(line.group())[:TEXT_CHARACTERS_MAX],
            )
    return None


def _of_memory_monitor(log: str, pid: int) -> RayDeath | None:
    for selected in reversed(list(_SELECTED.finditer(log))):
        if not re.search(rf"\bpid={pid}\b", selected.group()):
            continue
        before = log[: selected.start()]
        memory, limit = _last(_MEMORY, before), _last(_THRESHOLD, before)
        text = "Ray's memory monitor killed it, because the memory of its node ran low"
        text += f": {memory}" if memory else ""
        line = f"{memory}; {limit}; {selected.group()}" if limit else selected.group()
        return RayDeath(
            reason=RayReason.OUT_OF_MEMORY, text=text[:TEXT_CHARACTERS_MAX], line=line[:TEXT_CHARACTERS_MAX]
        )
    return None


def _of_raylet(log: str, raylet_pid: int) -> RayDeath:
    who = f"the raylet of its node (pid {raylet_pid})" if raylet_pid else "the raylet of its node"
    dead, asked = _last_line(_RAYLET_DEAD, log), _last_line(_RAYLET_TERM, log)
    if dead:
        text = f"its node is lost: {who} ended, because the GCS had counted the node as dead"
        return RayDeath(reason=RayReason.NODE_LOST, text=text, line=dead[:TEXT_CHARACTERS_MAX])
    if asked:
        text = f"{who} was asked to end, as by `ray stop`, and Ray's workers end with it"
        return RayDeath(reason=RayReason.NODE_STOPPED, text=text, line=asked[:TEXT_CHARACTERS_MAX])
    text = f"its node is lost to Ray: {who} died without a word, and Ray's workers end with it"
    return RayDeath(reason=RayReason.NODE_LOST, text=text)


def _last(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.findall(text)
    return _plain(found[-1]) if found else ""


def _last_line(pattern: re.Pattern[str], text: str) -> str:
    """The last line in which it is; empty: none."""
    starts = [m.start() for m in pattern.finditer(text)]
    return _plain(text[text.rfind("\n", 0, starts[-1]) + 1 :].partition("\n")[0]) if starts else ""


def _sentence(text: str) -> str:
    return text.strip().rstrip(".")


def _plain(text: str, *, keep_lines: bool = False) -> str:
    """Without colours and, but for line ends where they are kept, control characters."""
    return "".join(c for c in _COLOUR.sub("", text) if c.isprintable() or (keep_lines and c == "\n")).strip()
