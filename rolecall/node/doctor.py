"""Checks of a node (`rolecall doctor`): can it be monitored, and how is each problem fixed?

Facts of the node (`facts.py`) are one frozen value; each check is a pure function of them and reports its result with a
fix. Exit code 0: nothing is broken; 1: something is. With `--nhc` the codes of node health checks and monitoring
plug-ins: 0 ok, 1 warnings, 2 broken, 3 unknown.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from rolecall.core.text import counted

CLOCK_ERROR_SECONDS_MAX = 0.5
"""Error of an incident's times between nodes; the detectors tolerate one second."""
FREE_BYTES_MIN = 256 << 20
FREE_BYTES_LOW = 2 << 30
FILES_MIN = 1024
FILES_LOW = 8192
PTRACE_OFF = 3
TIME_ERROR = 5
"""State that adjtimex(2) returns for an unsynchronized clock."""
GPU_PROBES = ("gpu", "gpu_events")
"""Of the agent: without a GPU they have nothing to read."""
EXIT_STATUS_KERNEL = (6, 15)
"""From this Linux version on, a pidfd reports the exit status of a process that its parent has already reaped."""


class CheckLevel(StrEnum):
    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"
    UNKNOWN = "unknown"


NHC_CODES = {CheckLevel.OK: 0, CheckLevel.WARNING: 1, CheckLevel.BROKEN: 2, CheckLevel.UNKNOWN: 3}
SEVERITY = (CheckLevel.OK, CheckLevel.UNKNOWN, CheckLevel.WARNING, CheckLevel.BROKEN)
"""Order of severity: `unknown` is reported only if nothing worse is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """Another agent's wall clock minus this node's, with its error. `seconds` None: unknown, see `reason`."""

    agent: str
    seconds: float | None = None
    error_seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts of a node. None: unreadable or absent."""

    is_root: bool = False
    kernel: str = ""
    gpu_devices: int = 0  # /dev/nvidia0 ...
    pci_gpus: int = 0  # NVIDIA display controllers on the PCI bus
    driver: str = ""  # version, of /proc/driver/nvidia
    nvml: str = ""  # why NVML cannot be used; empty: it can
    nvml_wanted: bool = True  # agent.yaml has `gpu` switched on
    kmsg: str = ""  # why the kernel log cannot be read; empty: it can
    kernel_log: str = "/dev/kmsg"  # where agent.yaml has it; empty: switched off
    py_spy: bool = False
    ptrace_scope: int | None = None  # kernel/yama
    agent: str = ""  # response of the agent's port; empty: no listener
    agent_url: str = ""
    probes_down: Mapping[str, str] = field(default_factory=dict)  # what the agent cannot read, and why
    open_to_network: str = ""  # where the agent listens beyond loopback without TLS
    socket: bool = False  # the agent's registration socket exists
    socket_uid: int | None = None  # its owner
    socket_gid: int | None = None  # its group, if that may connect
    rank_uid: int | None = None  # owner of the process given by --pid
    rank_gids: frozenset[int] = frozenset()  # and its groups
    hidepid: str = ""  # of /proc, where other users' processes are hidden
    data_dir: str = ""
    data_dir_exists: bool = True
    data_dir_error: str = ""  # why it cannot be written or created; empty: it can
    free_bytes: int | None = None
    free_inodes: int | None = None
    environ: Mapping[str, str] = field(default_factory=dict)  # of this shell, or of the process given by --pid
    raylets: Mapping[int, bool | None] = field(default_factory=dict)  # PID -> cleans process groups up; None: unknown
    clock_state: int | None = None  # of adjtimex
    clock_error_seconds: float | None = None
    clock_offsets: tuple[ClockOffset, ...] = ()  # of other agents, where some were named
    pressure: bool = False
    pidfd: bool = False
    files_soft: int = 0
    files_hard: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCheck:
    """`fix`: what to do; empty if ok."""

    name: str
    level: CheckLevel
    message: str
    fix: str = ""


def examine(facts: NodeFacts) -> tuple[NodeCheck, ...]:
    """Every check, in a fixed order. A check's name is that of its function."""
    checks = (
        *(
            _driver,
            _nvml,
            _kernel_log,
            _stacks,
            _processes,
            _agent,
            _network,
            _probe,
            _socket,
            _data_dir,
            _nccl,
            _ray,
            _clock,
            _clocks,
        ),
        *(_pressure, _exits, _files),
    )
    return tuple(
        NodeCheck(name=check.__name__.removeprefix("_"), **result._asdict())
        for check in checks
        for result in check(facts)
    )


def worst(checks: tuple[NodeCheck, ...]) -> CheckLevel:
    return max((c.level for c in checks), key=SEVERITY.index, default=CheckLevel.UNKNOWN)


class _Result(NamedTuple):
    """Result of a check."""

    level: CheckLevel
    message: str
    fix: str = ""


_ok = partial(_Result, CheckLevel.OK)
_warning = partial(_Result, CheckLevel.WARNING)
_broken = partial(_Result, CheckLevel.BROKEN)
_unknown = partial(_Result, CheckLevel.UNKNOWN)


def _driver(facts: NodeFacts) -> Iterator[_Result]:
    there = max(facts.gpu_devices, facts.pci_gpus)
    if not _has_gpu(facts):
        yield _ok("no NVIDIA GPU on this node")
    elif not facts.driver:
        yield _broken(
            f"{counted(there, 'NVIDIA GPU')} and no driver loaded",
            "load it (modprobe nvidia); the kernel log shows why it is not loaded",
        )
    elif facts.gpu_devices < facts.pci_gpus:
        yield _warning(
            f"{facts.pci_gpus} NVIDIA GPUs on the PCI bus, {facts.gpu_devices} device files",
            "run nvidia-modprobe -u -c 0, or check the kernel log for a GPU that did not come up",
        )
    else:
        yield _ok(f"driver {facts.driver}, {counted(facts.gpu_devices, 'GPU')}")


def _has_gpu(facts: NodeFacts) -> bool:
    return bool(facts.driver or facts.gpu_devices or facts.pci_gpus)


def _nvml(facts: NodeFacts) -> Iterator[_Result]:
    if not _has_gpu(facts):
        return
    if not facts.nvml_wanted:
        yield _ok("not checked: gpu is disabled in agent.yaml")
    elif facts.nvml:
        yield _broken(
            f"NVML cannot be used: {facts.nvml}",
            "pip install nvidia-ml-py; in a container mount the driver's libnvidia-ml.so.1 "
            "(nvidia-container-toolkit); a version mismatch needs a reboot after a driver update",
        )
    else:
        yield _ok("NVML answers")


def _kernel_log(facts: NodeFacts) -> Iterator[_Result]:
    if not facts.kernel_log:
        yield _ok("not read: disabled in agent.yaml")
    elif not facts.kmsg:
        yield _ok(f"{facts.kernel_log} can be read")
    else:
        yield _warning(
            f"XIDs, OOM kills and link events are not seen: {facts.kernel_log}: {facts.kmsg}",
            "run the agent with CAP_SYSLOG (AmbientCapabilities=CAP_SYSLOG), or set kernel.dmesg_restrict=0, or name a "
            "file that a syslog daemon writes (kernel_log: {path: ...})",
        )


def _stacks(facts: NodeFacts) -> Iterator[_Result]:
    if not facts.py_spy:
        yield _warning("py-spy is not installed: no stacks of hung processes", "pip install py-spy")
    elif facts.ptrace_scope == PTRACE_OFF:
        yield _warning(
            "kernel.yama.ptrace_scope is 3: no process can read stacks until the next boot",
            "set kernel.yama.ptrace_scope=1 in /etc/sysctl.d and reboot",
        )
    elif facts.ptrace_scope and not facts.is_root:
        yield _warning(
            f"kernel.yama.ptrace_scope is {facts.ptrace_scope}: py-spy reads only its own children without "
            "CAP_SYS_PTRACE",
            "run the agent as root or with CAP_SYS_PTRACE, or set kernel.yama.ptrace_scope=0",
        )
    else:
        yield _ok("py-spy can read stacks" if facts.is_root else "py-spy can read stacks of the same user")


def _processes(facts: NodeFacts) -> Iterator[_Result]:
    if facts.hidepid and not facts.is_root:
        yield _warning(
            f"/proc is mounted with hidepid={facts.hidepid}: processes of other users are not seen",
            "run the agent as root or as the job's user, or mount /proc with gid= of a group that the agent is in",
        )


def _probe(facts: NodeFacts) -> Iterator[_Result]:
    for probe, reason in facts.probes_down.items():
        if probe in GPU_PROBES and not _has_gpu(facts):
            continue
        yield _warning(
            f"the agent cannot read {probe}: {reason or 'no reason given'}",
            "grant its user the permission (docs/reference/agent.md, Permissions), or disable that section",
        )


def _socket(facts: NodeFacts) -> Iterator[_Result]:
    if facts.rank_uid is None:
        return
    if facts.socket_uid is None:
        yield _unknown(
            f"the process cannot register yet: {facts.data_dir}/agent.sock does not exist", "start the agent first"
        )
    elif facts.rank_uid in (0, facts.socket_uid) or facts.socket_gid in facts.rank_gids:
        yield _ok(f"the process (user {facts.rank_uid}) may register at {facts.data_dir}/agent.sock")
    else:
        yield _warning(
            f"the process runs as user {facts.rank_uid}, but {facts.data_dir}/agent.sock is only for user "
            f"{facts.socket_uid} and group {facts.socket_gid}: it cannot register",
            "run the agent with the job's user or group (systemd: DynamicUser=no, User=, Group=)",
        )


def _agent(facts: NodeFacts) -> Iterator[_Result]:
    if not facts.agent:
        yield _warning(
            f"no agent listens at {facts.agent_url}", "start it with `rolecall agent`; its log shows why it ended"
        )
    elif facts.agent != "ok":
        yield _broken(
            f"{facts.agent_url}: {facts.agent}",
            "something else holds the port, or the agent is stuck: restart it, or give it another port",
        )
    elif not facts.socket:
        yield _warning(
            f"the agent answers, but its socket {facts.data_dir}/agent.sock does not exist",
            "give doctor the agent's own --config; if the directory was cleared, restart the agent",
        )
    else:
        yield _ok(f"the agent answers at {facts.agent_url}")


def _network(facts: NodeFacts) -> Iterator[_Result]:
    if facts.open_to_network:
        yield _warning(
            f"the agent is open to the network without TLS: {facts.open_to_network}",
            "set web_config_file in agent.yaml (TLS and users), or listen on 127.0.0.1",
        )


def _data_dir(facts: NodeFacts) -> Iterator[_Result]:
    if facts.data_dir_error:
        yield _broken(
            f"{facts.data_dir}: {facts.data_dir_error}",
            "create it, owned by the agent's user, or set another one (data_dir, $ROLECALL_AGENT_DIR)",
        )
    elif not facts.data_dir_exists:
        yield _ok(f"{facts.data_dir}: the agent creates it at its first start")
    elif facts.free_bytes is None:
        yield _unknown(f"{facts.data_dir}: free space cannot be read", "run doctor as the agent's user")
    elif facts.free_bytes < FREE_BYTES_LOW or facts.free_inodes == 0:
        found = _broken if facts.free_bytes < FREE_BYTES_MIN or facts.free_inodes == 0 else _warning
        left = f"{facts.free_bytes >> 20} MiB and {facts.free_inodes} inodes free"
        yield found(f"{facts.data_dir}: {left}: events will soon not be stored", "free disk space")
    else:
        yield _ok(f"{facts.data_dir}: {facts.free_bytes >> 30} GiB free")


# Names of PyTorch's and NCCL's documentation; newer torch reads TORCH_FR_BUFFER_SIZE for the older name, too.
_OFF = ("0", "false", "off", "no")
_HINDRANCES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        "PyTorch's Flight Recorder is off: a hung collective cannot be identified",
        "set it to 2000",
    ),
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "no Flight Recorder dump is written at a timeout", "set it to 1"),
    (("TORCH_NCCL_ENABLE_MONITORING",), "torch's watchdog thread is not monitored", "set it to 1"),
    (("TORCH_NCCL_ASYNC_ERROR_HANDLING",), "a failed collective blocks forever", "unset it"),
    (("NCCL_RAS_ENABLE",), "NCCL RAS is off: the state of communicators is not available", "set it to 1"),
)


def _nccl(facts: NodeFacts) -> Iterator[_Result]:
    off = [
        _warning(f"{name}={facts.environ[name]}: {message}", fix)
        for names, message, fix in _HINDRANCES
        for name in names
        if facts.environ.get(name, "").strip().lower() in _OFF
    ]
    if off:
        yield from off
    elif facts.rank_uid is not None:
        yield _ok("torch and NCCL settings allow diagnosis")
    else:
        yield _ok("no rank was checked; --pid PID checks the torch and NCCL settings of one")


RAY_CLEANUP = "RAY_process_group_cleanup_enabled"


def _ray(facts: NodeFacts) -> Iterator[_Result]:
    for pid, cleans in sorted(facts.raylets.items()):
        if cleans is None:
            yield _unknown(f"the environment of Ray's raylet {pid} cannot be read", "run it as Ray's user, or root")
        elif not cleans:
            # vllm#55510: an engine core that outlived its actor kept 115 GiB of the GPU.
            yield _warning(
                f"Ray's raylet {pid} leaves the children of dead actors running: an engine's core can keep its GPU",
                f"set {RAY_CLEANUP}=1 before `ray start`; `rolecall node orphans` lists what was left",
            )
        else:
            yield _ok(f"Ray's raylet {pid} ends the children of dead actors")


def _clock(facts: NodeFacts) -> Iterator[_Result]:
    if facts.clock_state is None or facts.clock_error_seconds is None:
        yield _unknown(
            "the kernel does not report the clock's error",
            "in a container allow adjtimex, or run doctor on the node itself",
        )
    elif facts.clock_state == TIME_ERROR:
        yield _warning("the kernel's clock is not synchronized", "start chronyd or systemd-timesyncd")
    elif facts.clock_error_seconds > CLOCK_ERROR_SECONDS_MAX:
        yield _warning(
            f"the clock may be wrong by {facts.clock_error_seconds:.2f} s",
            "give chronyd a closer server; events on different nodes are ordered no better than this",
        )
    else:
        yield _ok(f"synchronized within {facts.clock_error_seconds * 1000:.0f} ms")


def _clocks(facts: NodeFacts) -> Iterator[_Result]:
    apart = 0.0
    for offset in facts.clock_offsets:
        if offset.seconds is None:
            yield _unknown(
                f"{offset.agent}: clock unknown: {offset.reason}", "check that its agent runs and is reachable"
            )
            continue
        apart = max(apart, abs(offset.seconds))
        if abs(offset.seconds) - offset.error_seconds > CLOCK_ERROR_SECONDS_MAX:
            way = "ahead of" if offset.seconds > 0 else "behind"
            yield _warning(
                f"{offset.agent}: its clock is {abs(offset.seconds):.2f} s {way} this node's",
                "start chronyd or systemd-timesyncd on both, with the same servers",
            )
    if (
        facts.clock_offsets
        and apart <= CLOCK_ERROR_SECONDS_MAX
        and all(o.seconds is not None for o in facts.clock_offsets)
    ):
        yield _ok(f"{counted(len(facts.clock_offsets), 'other clock')}, within {apart * 1000:.0f} ms of this node's")


def _pressure(facts: NodeFacts) -> Iterator[_Result]:
    if facts.pressure:
        yield _ok("/proc/pressure exists")
    else:
        yield _warning(
            "/proc/pressure does not exist: CPU, memory and disk pressure are not measured",
            "boot with psi=1 (kernel built with CONFIG_PSI)",
        )


def _exits(facts: NodeFacts) -> Iterator[_Result]:
    if not facts.pidfd:
        yield _broken(
            "pidfd_open does not work: the agent cannot detect exits",
            "Linux 5.3 or newer; in a container a seccomp profile that allows pidfd_open",
        )
    elif _version(facts.kernel) < EXIT_STATUS_KERNEL:
        yield _warning(
            f"Linux {facts.kernel}: exit status unknown if the parent reaps a process before the agent",
            "use Linux 6.15 or newer; exits themselves are detected",
        )
    else:
        yield _ok("exits and exit status are detected")


def _files(facts: NodeFacts) -> Iterator[_Result]:
    if facts.files_soft < FILES_LOW:
        found = _broken if facts.files_soft < FILES_MIN else _warning
        yield found(
            f"{facts.files_soft} open files allowed ({facts.files_hard} at most): Ray and many ranks need more",
            "ulimit -n 65536, LimitNOFILE=65536 in the unit",
        )
    else:
        yield _ok(f"{facts.files_soft} open files allowed")


def _version(text: str) -> tuple[int, ...]:
    """`6.18.33-cloud` -> (6, 18)."""
    return tuple(int("".join(takewhile(str.isdecimal, part)) or 0) for part in text.split(".")[:2])
