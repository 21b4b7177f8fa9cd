"""Sections of the actuators: one class each, chosen by `kind`."""

import re
from collections.abc import Sequence
from pathlib import PurePath
from string import Formatter
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from rolecall.core.config.section import RecoveryMode, Seconds, Section

COMMAND_FIELDS = frozenset(
    {"replica", "role", "index", "incarnation", "node", "rank", "pid", "start_ticks", "job", "incident", "because"}
)
REPLICA_FIELDS = frozenset({"replica", "role", "index", "incarnation", "node"})
MEMBER_FIELDS = frozenset({"replica", "role", "index", "node", "job"})
"""Of templates that name where a replica's process runs."""
POD_FIELDS = MEMBER_FIELDS - {"replica"}
"""Of names of pods and values of labels, which contain no slash, as `rollout/1` does."""
_REMOTE_SHELLS = frozenset({"ssh", "rsh", "mosh", "pdsh", "dsh", "clush", "pssh", "parallel-ssh"})
"""Programs that join their arguments and let the shell of another machine read them."""
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "fish", "csh", "tcsh", "su"})
_SCRIPT_OPTION = re.compile(r"-[a-z]*c")
_NUMBERS = frozenset({"index", "incarnation", "rank", "pid", "start_ticks"})


def _checked_template(text: str, fields: frozenset[str] = COMMAND_FIELDS) -> str:
    """Raises ValueError: it has a field that is not known, or a format that the field does not take, or is no
    template."""
    for _, name, _, _ in Formatter().parse(text):
        if name is not None and name not in fields:
            known = ", ".join(f"{{{f}}}" for f in sorted(fields))
            raise ValueError(f"{{{name}}} is not known here, only {known}; write {{{{ for a brace")
    text.format_map({f: 1 if f in _NUMBERS else "x" for f in fields})
    return text


def _check_shells(argv: Sequence[str]) -> None:
    """Raises ValueError: a shell would read {because}, in which the job may have put commands, options and words."""
    names = [PurePath(text).name for text in argv]
    for i, text in enumerate(argv):
        if all(name != "because" for _, name, _, _ in Formatter().parse(text)):
            continue
        if not _REMOTE_SHELLS.isdisjoint(names):
            raise ValueError("{because} may quote the job's own text, which the shell of the other machine would read")
        if i > 0 and _SCRIPT_OPTION.fullmatch(argv[i - 1]) and not _SHELLS.isdisjoint(names[:i]):
            raise ValueError("{because} may quote the job's own text; give it to the script as an argument of its own")


def _checked_url(url: str) -> str:
    """Raises ValueError: it has no host, or no valid port."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError("expected http[s]://HOST[:PORT]")
    return url


_Url = Annotated[str, AfterValidator(_checked_url)]
_ServerUrl = Annotated[_Url, Field(pattern=r"^https?://[^/?#]+$")]


class CommandActuator(Section):
    """Replaces a replica by a command of your own: for whatever has a command line or an API of its own."""

    kind: Literal["command"]
    replace: Annotated[list[str], Field(min_length=1)]
    """Program and arguments, without a shell. Exit code 0: the replica was ended, and its replacement starts by itself
    or was started. Arguments may contain {replica}, {role}, {index}, {incarnation}, {node}, {job}, {incident},
    {because}, and {rank}, {pid}, {start_ticks} of the process with the lowest rank. {job} is the job's own text: a
    command that names it is not called for a job without a name of letters, digits and _.:/@-, a letter or digit first.
    {because} may quote the job's messages: with ssh, or inside the script of `sh -c`, it is refused."""
    move: list[str] | None = None
    """The same for a fault that stays with the node: the replacement must start on another one. null: such faults page
    on-call."""
    also_ends: Literal["nothing", "node", "job"] = "nothing"
    """Which other replicas the command takes down: those on the same node, or all of the same job."""
    repeatable: bool = False
    """A second call for the same fault does no harm. Otherwise, if the watch dies during the call, its successor pages
    on-call instead of calling again. The command gets the same ROLECALL_ACTION_KEY both times."""
    call_seconds: Seconds = 60.0
    """The command is ended after this time, and the action has failed."""

    @field_validator("replace", "move")
    @classmethod
    def _templates(cls, argv: list[str] | None) -> list[str] | None:
        for text in argv or ():
            _checked_template(text, COMMAND_FIELDS)
        if argv is not None and (not argv or not argv[0]):
            raise ValueError("expected a program and its arguments")
        _check_shells(argv or ())
        return argv


class ProcessesActuator(Section):
    """Ends the replica's processes, with their descendants, and leaves the rest to what started them: a launcher, or
    the framework's own monitor (slime, in older versions with `--use-fault-tolerance`; NeMo-RL with
    `generation_fleet_health`)."""

    kind: Literal["processes"]
    run_on_node: tuple[str, ...] = ()
    """How a command is run on {node}, as [ssh, "{node}"]. Empty: all processes are on this machine."""
    program: Annotated[tuple[str, ...], Field(min_length=1)] = ("rolecall",)
    """The command line of rolecall there: `rolecall node end PID --start-ticks TICKS` is run for each process. It ends
    no other process that has the PID by now."""
    grace_seconds: Annotated[float, Field(ge=0, le=600)] = 0.0
    """Between SIGTERM and SIGKILL. 0: SIGKILL at once; a stopped process reads no SIGTERM."""
    call_seconds: Seconds = 30.0
    """Of the end of one process, the way to its node included."""

    @field_validator("run_on_node")
    @classmethod
    def _templates(cls, argv: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_checked_template(text, frozenset({"node"})) for text in argv)


class ReaperConfig(Section):
    """Ends engine processes whose server is gone, with their descendants: as `rolecall node orphans` lists them."""

    mode: RecoveryMode | None = None
    """Mode of the incidents of orphans, which needs no actuator. null: that of `recovery.mode`."""
    run_on_node: tuple[str, ...] = ()
    """How a command is run on {node}, as [ssh, "{node}"]. Empty: all processes are on this machine."""
    program: Annotated[tuple[str, ...], Field(min_length=1)] = ("rolecall",)
    """The command line of rolecall there: `rolecall node end PID --start-ticks TICKS --orphan` is run. It ends no
    process that is no orphan at that moment."""
    grace_seconds: Annotated[float, Field(ge=0, le=600)] = 10.0
    """Between SIGTERM and SIGKILL."""
    call_seconds: Seconds = 30.0
    """Of one end, the way to its node included."""

    @field_validator("run_on_node")
    @classmethod
    def _templates(cls, argv: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_checked_template(text, frozenset({"node"})) for text in argv)


class MilesActuator(Section):
    """miles: suspends the replica's cell and resumes it, through the control server of the job."""

    kind: Literal["miles"]
    url: _Url
    """Of the control server (`--control-server-port`), as http://head:18080."""
    cells: dict[str, str] = Field(default={"trainer": "actor-{index}", "rollout": "rollout-{index}"})
    """Role -> name of the cell of a replica. Replicas of other roles are refused."""
    poll_seconds: Seconds = 1.0
    """Between two looks at the cell until it is suspended."""

    @field_validator("cells")
    @classmethod
    def _templates(cls, cells: dict[str, str]) -> dict[str, str]:
        return {role: _checked_template(text, REPLICA_FIELDS) for role, text in cells.items()}


class VerlActuator(Section):
    """verl: replaces a standalone rollout replica through the plugin in the job, which makes verl's own calls at its
    next weight update. Replicas that share their processes with the trainer are refused."""

    kind: Literal["verl"]
    url: _ServerUrl
    """Of the process that sends the weights (`ROLECALL_VERL_REPLACE` of the job), as http://head:9479."""
    token_path: Annotated[str, Field(min_length=1)]
    """File with the job's token (`ROLECALL_VERL_TOKEN_FILE` of the job), read for each call."""
    roles: tuple[str, ...] = ("rollout",)
    """Roles whose replica N is verl's replica N. Replicas of other roles are refused."""
    begin_seconds: Seconds = 240.0
    """Within which the job's next weight update must begin; otherwise nothing is changed, and the action has failed. A
    new engine that runs waits as long for the update after that, and for its weights and requests; then it is ended.
    More than a step takes, and less than the watch's `deadline_seconds`, in which an engine has to start, too, and to
    get weights."""
    poll_seconds: Seconds = 2.0
    """Between two looks at how far the replacement is; longer after a while."""
    call_seconds: Seconds = 10.0
    """Deadline of each request."""


class TorchftActuator(Section):
    """torchft: the lighthouse asks a replica group to end; its launcher starts it again, and it heals from a peer."""

    kind: Literal["torchft"]
    url: _Url
    """Of the lighthouse, as http://head:29510."""
    groups: dict[str, str] = Field(default={"trainer": "{index}"})
    """Role -> replica id of a replica's group, without the part after the colon that torchft adds. Replicas of other
    roles are refused."""
    processes: ProcessesActuator | None = None
    """How a group that is not in the newest quorum is ended, which the lighthouse cannot do: one that hangs leaves the
    quorum after the lighthouse's join timeout. null: such a group is left to on-call."""

    @field_validator("groups")
    @classmethod
    def _templates(cls, groups: dict[str, str]) -> dict[str, str]:
        return {role: _checked_template(text, REPLICA_FIELDS) for role, text in groups.items()}


class SlurmActuator(Section):
    """Replaces a replica that is a Slurm job of its own, or a job step of its own, by Slurm's own commands."""

    kind: Literal["slurm"]
    unit: Literal["job", "step"] = "job"
    """`job`: the batch job is requeued (`scontrol requeue`), and starts again wherever Slurm finds room. `step`: the
    step is ended (`scancel JOB.STEP`), and the job's script starts it again, on the same nodes."""
    job: str = ""
    """Slurm job of a process, as a template, where neither its cgroup nor srun's variables tell it: "{job}" for
    torchrun with `--rdzv-id $SLURM_JOB_ID`. Empty: such a replica is not replaced."""
    drain: bool = True
    """For a fault that stays with the node: its node is drained (`scontrol update state=drain`) before the job is
    requeued; this needs a Slurm operator. false: such faults page on-call."""
    start_now: bool = True
    """A requeued job may start as soon as its processes have ended (`scontrol update starttime=now`). false: after the
    two minutes for which Slurm holds it back."""
    programs: str = ""
    """Folder of scontrol and scancel. Empty: found in PATH."""
    call_seconds: Seconds = 30.0
    """Deadline of each command."""

    @field_validator("job")
    @classmethod
    def _template(cls, text: str) -> str:
        return _checked_template(text, MEMBER_FIELDS)


class KubernetesServer(Section):
    """How the API server of Kubernetes is reached; the defaults are right inside a pod."""

    api: _ServerUrl = "https://kubernetes.default.svc"
    """URL of the API server."""
    token_path: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    """File with the bearer token, read for each call. Empty: none is sent."""
    ca_path: str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    """File with the certificates of the authority that signed the server's. Empty: the system's."""
    call_seconds: Seconds = 10.0
    """Deadline of each request."""


class _KubernetesApi(KubernetesServer):
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
    """Of the job's pods."""
    container: str = ""
    """The container of a pod that holds the job's processes. Empty: the pod's first."""
    cordon: bool = True
    """For a fault that stays with the node: its node is cordoned before the pod ends; this needs permission to patch
    nodes. false: such faults page on-call."""
    cordon_by: Literal["rolecall", "nvsentinel"] = "rolecall"
    """`nvsentinel`: a MaintenanceRequest asks NVSentinel (1.25 or newer) to cordon that node. It then drains the whole
    node: all other replicas there end, too."""

    @model_validator(mode="after")
    def _cordons(self) -> Self:
        if self.cordon_by != "rolecall" and not self.cordon:
            raise ValueError(f"cordon_by: {self.cordon_by} needs cordon: true")
        return self


class KubernetesActuator(_KubernetesApi):
    """Replaces a replica by evicting its pods; their controller (Job, StatefulSet, Deployment, ...) makes others."""

    kind: Literal["kubernetes"]
    pod: str = ""
    """Name of the pod of a process, as a template: "{node}" where an agent runs in each pod and is named after it, or
    "rollout-{index}". Give this or `selector`."""
    selector: str = ""
    """Label selector of the job's pods, as a template: "app=rollout,replica={index}", or "app=rollout". Of the pods
    that it finds, those that hold the replica's processes are evicted. Where the agent cannot read their pod's UID,
    that is the only one on the node."""

    @field_validator("pod", "selector")
    @classmethod
    def _templates(cls, text: str) -> str:
        return _checked_template(text, POD_FIELDS)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if bool(self.pod) == bool(self.selector):
            raise ValueError("give either pod or selector")
        return self


class KubeRayActuator(_KubernetesApi):
    """Replaces the worker pods of a replica in a RayCluster of KubeRay, through `scaleStrategy.workersToDelete`. Not
    with `enableInTreeAutoscaling`, which sets that field itself."""

    kind: Literal["kuberay"]
    cluster: Annotated[str, Field(pattern=r"^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?$")]
    """Name of the RayCluster."""
    selector: str = ""
    """A further label selector of its pods, as a template, where a node runs several of them."""
    wait_seconds: Seconds = 120.0
    """For KubeRay to delete the pods. Then `workersToDelete` is cleared, and, if they still exist, the action has
    failed. At most half of the watch's `deadline_seconds`."""

    @field_validator("selector")
    @classmethod
    def _template(cls, text: str) -> str:
        return _checked_template(text, POD_FIELDS)


ActuatorConfig = Annotated[
    CommandActuator
    | ProcessesActuator
    | SlurmActuator
    | KubernetesActuator
    | KubeRayActuator
    | MilesActuator
    | VerlActuator
    | TorchftActuator,
    Field(discriminator="kind"),
]
