"""Slurm: requeues the job of a replica, or ends its job step, which the job's script starts again.

A job keeps its number when it is requeued, and numbers of steps begin again then. So that a number never means a later
process than the one that the plan names: job or step must have started before that process was first seen, and must run
on its node. An array's first number stands for all its jobs; a job of an array is therefore named `array_task`.
"""

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import PurePath
from typing import Any

from rolecall.core.config.actuators import SlurmActuator
from rolecall.core.diagnosis import ActionKind
from rolecall.core.errors import ActuatorError
from rolecall.core.text import plain
from rolecall.recovery.actuators.calls import Call, CommandCall, Procedure, Reply
from rolecall.recovery.actuators.targets.target import HasEnded, Member, Order, filled

CLOCKS_DIFFER_SECONDS = 2.0
"""Between the controller and a node."""
REASON_CHARACTERS = 200
WAITS_SECONDS = (0.5, 1.0, 2.0, 3.0, 5.0)
"""Between two looks at whether job or step has ended; the last one repeats."""
_STEP = re.compile(r"(\d{1,10})\.(\d{1,10})")
_JOB = re.compile(r"\d{1,10}")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_NO_STEP = "not found"
_ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
_GONE = re.compile(r"Invalid job id specified|Job step .*not found|Invalid job step", re.IGNORECASE)
_ENVIRONMENT = {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """A job or step as scontrol shows it. `name`: as scontrol and scancel take it; `started_at`: wall seconds."""

    name: str
    state: str
    started_at: float
    node_list: str
    restarts: int = 0
    requeue: bool = True
    batch: bool = True
    heterogeneous: bool = False


class Slurm:
    name = "slurm"

    def __init__(self, config: SlurmActuator) -> None:
        self._config = config
        # A step's replacement runs in the same allocation, and so perhaps on the same node.
        move = {ActionKind.REPLACE_NODE} if config.drain and config.unit == "job" else set()
        self.supports = frozenset({ActionKind.REPLACE_REPLICA, *move})

    def also_hit(self, order: Order) -> Sequence[str]:
        mine = {_numbers(m, self._config.job) for m in order.members} - {None}
        steps = self._config.unit == "step"
        hit = {m.label for m in self._unknown(order) if m.node in order.nodes} if mine else set[str]()
        for member in order.others:
            theirs = _numbers(member, self._config.job)
            for unit in mine:
                if unit is None or theirs is None or unit[0] != theirs[0]:
                    continue
                # A process of the job whose step is not known may be in this one.
                if not steps or "" in (unit[1], theirs[1]) or unit[1] == theirs[1]:
                    hit.add(member.label)
        return sorted(hit)

    def _unknown(self, order: Order) -> list[Member]:
        """Processes of others that may be in any Slurm job. Where one of the same node has its job from its cgroup, all
        of that node's jobs would have it from there."""
        told = {m.node for m in (*order.members, *order.others) if m.slurm_step}
        return [m for m in order.others if m.node not in told and _numbers(m, self._config.job) is None]

    def replace(self, order: Order) -> Procedure:
        if not order.members:
            if order.begun:
                return f"{order.replica}#{order.incarnation} has ended"
            raise ActuatorError(f"no process of {order.replica}#{order.incarnation} is seen: nothing to end")
        job, step = self._unit_of(order)
        try:
            if self._config.unit == "step":
                return (yield from self._end_step(order, job, step))
            return (yield from self._requeue(order, job))
        except HasEnded as e:
            if order.begun:
                return f"{order.replica}#{order.incarnation} has ended: {e}"
            raise

    def _unit_of(self, order: Order) -> tuple[str, str]:
        """Job and step of the members. Raises ActuatorError: they are not in one of each."""
        found = {_numbers(m, self._config.job) for m in order.members}
        if None in found:
            lost = next(m for m in order.members if _numbers(m, self._config.job) is None)
            known = f"only of {lost.job}" if lost.job else "of no job"
            raise ActuatorError(
                f"rank {lost.rank} of {order.replica} is {known}: not started by srun? `job` of the actuator says where"
                " its Slurm job stands"
            )
        jobs = sorted({unit[0] for unit in found if unit is not None})
        steps = sorted({unit[1] for unit in found if unit is not None})
        if len(jobs) > 1:
            raise ActuatorError(f"{order.replica} runs in several Slurm jobs: {', '.join(jobs)}")
        if self._config.unit == "step" and (len(steps) > 1 or not steps[0]):
            raise ActuatorError(f"{order.replica} is not one step of Slurm job {jobs[0]}: {steps}")
        return jobs[0], steps[0]

    # --- a job --------------------------------------------------------------------------------------------------------

    def _requeue(self, order: Order, number: str) -> Procedure:
        job = yield from self._job(number, "read")
        if job is None:
            raise HasEnded(f"there is no Slurm job {number} any more")
        slurm_nodes = yield from self._check(order, job, f"Slurm job {job.name}")
        if job.heterogeneous:
            raise ActuatorError(f"Slurm job {job.name} is heterogeneous: Slurm cannot requeue a part of it")
        if not job.requeue or not job.batch:
            why = "it may not be requeued (sbatch --requeue)" if job.batch else "it is no batch job (sbatch)"
            raise ActuatorError(f"Slurm job {job.name}: {why}")
        drained = ""
        if order.leave_node:
            drained = yield from self._drain(order, slurm_nodes)
        try:
            return (yield from self._requeue_checked(order, number, job)) + drained
        except ActuatorError as e:
            raise ActuatorError(f"{e}{drained}") from None

    def _requeue_checked(self, order: Order, number: str, job: _Unit) -> Procedure:
        # Slurm knows no condition "only if it still is that one": nothing comes between this look and the call.
        if (yield from self._job(number, "again")) != job:
            raise ActuatorError(f"Slurm job {job.name} has changed meanwhile, and was not requeued")
        reply = yield self._scontrol(
            "requeue",
            f"requeue Slurm job {job.name}, {order.replica}",
            "requeue",
            job.name,
            changes=True,
            # Repeated only if the processes that the plan names still run, as just read.
            repeatable=True,
        )
        if reply.status != 0 and reply.known:
            raise ActuatorError(f"Slurm job {job.name} was not requeued: {reply.shown}")
        assumed = f"JobId={number} JobName=x\n JobState=PENDING\n Requeue=1 Restarts={job.restarts + 1} BatchFlag=1"
        for n in count():
            now = yield from self._job(number, f"ended-{n}", wait=n, assumed=Reply(status=0, text=assumed))
            if now is None or (now.state in _ENDED and now.restarts == job.restarts):
                raise ActuatorError(f"Slurm job {job.name} has ended, and was not requeued")
            is_another = now.restarts != job.restarts or now.started_at > job.started_at
            if is_another and now.state != "COMPLETING":
                started = "" if now.state != "PENDING" else (yield from self._start_now(job.name))
                return f"Slurm job {job.name} was requeued{started}"
        raise AssertionError

    def _start_now(self, name: str) -> Generator[Call, Reply, str]:
        """Ends the two minutes for which Slurm keeps a requeued job from starting. What was done, for a sentence."""
        if not self._config.start_now:
            return ""
        reply = yield self._scontrol(
            "start",
            f"let Slurm job {name} start now",
            "update",
            f"jobid={name}",
            "starttime=now",
            changes=True,
            repeatable=True,
        )
        return "" if reply.status == 0 else f", and may start only in two minutes ({reply.shown})"

    def _job(
        self, number: str, key: str, wait: int = -1, assumed: Reply | None = None
    ) -> Generator[Call, Reply, _Unit | None]:
        """None: there is none. Raises ActuatorError: it cannot be read."""
        text = yield from self._read(key, f"read Slurm job {number}", "job", number, wait, assumed)
        if text is None:
            return None
        # A job's number that stands for an array shows all of its jobs.
        found = [record for record in re.split(r"\n\s*\n", text) if _value(record, "JobId") == number]
        if len(found) != 1:
            raise ActuatorError(f"scontrol show job {number} does not show this job: {plain(text, 200)}")
        (record,) = found
        head = record.partition(" JobName=")[0]  # what follows is the user's text
        array, task = _value(head, "ArrayJobId", line="JobId"), _value(head, "ArrayTaskId", line="JobId")
        return _Unit(
            name=f"{array}_{task}" if array else number,
            state=_value(record, "JobState"),
            started_at=_seconds(_value(record, "StartTime")),
            node_list=_value(record, "NodeList"),
            restarts=int(_value(record, "Restarts", line="Requeue") or 0),
            requeue=_value(record, "Requeue") == "1",
            batch=_value(record, "BatchFlag", line="Requeue") not in ("", "0"),
            heterogeneous=bool(_value(head, "HetJobId", line="JobId")),
        )

    def _drain(self, order: Order, slurm_nodes: Mapping[str, str]) -> Generator[Call, Reply, str]:
        """What was done, to be added to a sentence. `slurm_nodes`: of the job, as `_check` returns them. Raises
        ActuatorError: the node is not drained."""
        node = slurm_nodes.get(order.node, "")
        if order.node not in order.nodes or not _NODE.fullmatch(node) or node.upper() == "ALL":
            raise ActuatorError(f"{order.node} is no node of {order.replica}: it is not drained, and nothing was ended")
        reply = yield self._scontrol("node", f"read Slurm node {node}", "show", "node", node)
        state = _value(reply.text, "State")
        if reply.status != 0 or _value(reply.text, "NodeName") != node or not state:
            raise ActuatorError(f"Slurm node {node} cannot be read, and nothing was ended: {reply.shown}")
        if "DRAIN" in state or "DOWN" in state:
            return f"; {node} was {state.lower()} already"
        reason = plain(f"rolecall {order.incident_id}: {order.because}", REASON_CHARACTERS)
        reply = yield self._scontrol(
            "drain",
            f"drain Slurm node {node}",
            "update",
            f"nodename={node}",
            "state=drain",
            f"reason={reason}",
            changes=True,
            prepares=True,
            repeatable=True,
        )
        if reply.status != 0:
            raise ActuatorError(f"Slurm node {node} was not drained, and nothing was ended: {reply.shown}")
        return f"; {node} drains"

    # --- a step -------------------------------------------------------------------------------------------------------

    def _end_step(self, order: Order, job: str, number: str) -> Procedure:
        if order.leave_node:
            raise ActuatorError(f"a job step of Slurm cannot leave its node {order.node}")
        name = f"{job}.{number}"
        step = yield from self._step(name, "read")
        if step is None:
            raise HasEnded(f"there is no Slurm step {name} any more")
        yield from self._check(order, step, f"Slurm step {name}")
        if (yield from self._step(name, "again")) != step:
            raise ActuatorError(f"Slurm step {name} has changed meanwhile, and was not ended")
        reply = yield self._command(
            "cancel",
            f"end Slurm step {name}, {order.replica}",
            "scancel",
            name,
            changes=True,
            repeatable=True,
        )
        if reply.status != 0 and reply.known:
            raise ActuatorError(f"Slurm step {name} was not ended: {reply.shown}")
        for n in count():
            now = yield from self._step(name, f"ended-{n}", wait=n, assumed=Reply(status=1, text=_NO_STEP))
            if now is None or now.state != "RUNNING" or now.started_at > step.started_at:
                return f"Slurm step {name} has ended"
        raise AssertionError

    def _step(
        self, name: str, key: str, wait: int = -1, assumed: Reply | None = None
    ) -> Generator[Call, Reply, _Unit | None]:
        text = yield from self._read(key, f"read Slurm step {name}", "step", name, wait, assumed)
        if text is None:
            return None
        if _value(text, "StepId") != name:
            raise ActuatorError(f"scontrol show step {name} does not show this step: {plain(text, 200)}")
        return _Unit(
            name=name,
            state=_value(text, "State"),
            started_at=_seconds(_value(text, "StartTime", line="StepId")),
            node_list=_value(text, "NodeList", line="State"),
        )

    # --- both ---------------------------------------------------------------------------------------------------------

    def _check(self, order: Order, unit: _Unit, words: str) -> Generator[Call, Reply, Mapping[str, str]]:
        """Its nodes: name of the agent, which has no capitals -> Slurm's. Raises ActuatorError: it is not what holds
        the members."""
        if unit.state != "RUNNING":
            raise HasEnded(f"{words} does not run: {unit.state.lower() or 'its state is not known'}")
        for member in order.members:
            if member.registered_at <= 0:
                raise ActuatorError(f"it is not known since when rank {member.rank} of {order.replica} runs")
            if not 0 < unit.started_at <= member.registered_at + CLOCKS_DIFFER_SECONDS:
                raise HasEnded(
                    f"{words} started after rank {member.rank} of {order.replica}#{order.incarnation}, and so does not"
                    " hold it"
                )
        reply = yield self._scontrol("nodes", f"read the nodes of {words}", "show", "hostnames", unit.node_list)
        names = set(reply.text.split())
        hosts = {name.lower(): name for name in names}
        if reply.status != 0 or not hosts or len(hosts) < len(names):
            raise ActuatorError(f"the nodes of {words} cannot be told apart: {reply.shown}")
        for node in order.nodes:
            if node not in hosts:
                raise ActuatorError(f"{words} does not run on {node}, as {order.replica} does, but on {unit.node_list}")
        beyond = sorted({m.label for m in self._unknown(order) if m.node in hosts} - {*self.also_hit(order)})
        if beyond:
            raise ActuatorError(
                f"{words} may hold {', '.join(beyond)}, too, whose Slurm job is not known, and which the plan does not"
                " name"
            )
        return hosts

    def _read(
        self, key: str, words: str, what: str, name: str, wait: int, assumed: Reply | None = None
    ) -> Generator[Call, Reply, str | None]:
        """`wait` >= 0: look number of several at whether it has ended; a controller that does not answer is then asked
        again."""
        after = 0.0 if wait < 0 else WAITS_SECONDS[min(wait, len(WAITS_SECONDS) - 1)]
        words += "" if wait < 0 else ", which was asked to end"
        for n in count(1):
            reply = yield self._scontrol(f"{key}-{n}", words, "show", what, name, after_seconds=after, assumed=assumed)
            if reply.status == 0:
                return reply.text
            if reply.known and _GONE.search(reply.text):
                return None
            if wait < 0:
                raise ActuatorError(f"{words}: {reply.shown}")
            after = WAITS_SECONDS[-1]
        raise AssertionError

    def _scontrol(self, key: str, words: str, *arguments: str, **more: Any) -> CommandCall:
        return self._command(key, words, "scontrol", *arguments, **more)

    def _command(
        self,
        key: str,
        words: str,
        program: str,
        *arguments: str,
        changes: bool = False,
        prepares: bool = False,
        repeatable: bool = False,
        assumed: Reply | None = None,
        after_seconds: float = 0.0,
    ) -> CommandCall:
        path = str(PurePath(self._config.programs) / program) if self._config.programs else program
        return CommandCall(
            key=key,
            words=words,
            argv=(path, *arguments),
            environment=_ENVIRONMENT,
            changes=changes,
            prepares=prepares,
            repeatable=repeatable,
            assumed=assumed,
            deadline_seconds=self._config.call_seconds,
            after_seconds=after_seconds,
        )


def _numbers(member: Member, template: str) -> tuple[str, str] | None:
    """(job, step) of a process: from its cgroup, else from its environment, else as the configuration says. Step empty:
    not known, or the batch script. None: no Slurm job is known."""
    job, _, step = member.slurm_step.partition(".")
    if _JOB.fullmatch(job):
        return job, step if step.isdecimal() else ""
    if template:
        job = filled(template, member)
        return (job, "") if _JOB.fullmatch(job) else None
    for name in (member.rendezvous, member.job):
        if match := _STEP.fullmatch(name):
            return match[1], match[2]
    return None


def _value(text: str, key: str, line: str = "") -> str:
    """Of `key=value` in the line of scontrol's output that begins with key `line`, or with this key. Empty: absent or
    `(null)`."""
    inner = "" if line in ("", key) else rf"{line}=[^\n]*?\s"
    found = re.search(rf"^\s*{inner}{key}=(\S*)", text, re.MULTILINE)
    return "" if found is None or found[1] == "(null)" else found[1]


def _seconds(text: str) -> float:
    """-1: not a time (`Unknown`)."""
    return float(text) if text.isdecimal() else -1.0
