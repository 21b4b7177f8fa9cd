"""Checks of a node (`rolecall doctor`): can it be monitored, and how is each problem fixed?

Facts of the node (`facts.py`) are one frozen value; each check is a pure function of them and reports its result with a
fix. Exit code 0: nothing is broken; 1: something is. With `--nhc` the codes of node health checks and monitoring
plug-ins: 0 ok, 1 warnings, 2 broken, 3 unknown.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

CLOCK_ERROR_SECONDS_MAX = 0.5
"""Error of an incident's times between nodes; the detectors tolerate one second."""
FREE_BYTES_MIN = 256 << 20
FREE_BYTES_LOW = 2 << 30
FILES_MIN = 1024
FILES_LOW = 8192
PTRACE_OFF = 3
TIME_ERROR = 5
"""State that adjtimex(2) returns for an unsynchronized clock."""
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
    """What was read of a node. None: unreadable or absent."""

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
    socket: bool = False  # the agent's registration socket exists
    socket_uid: int | None = None  # its owner
    rank_uid: int | None = None  # owner of the process given by --pid
    hidepid: str = ""  # of /proc, where other users' processes are hidden
    data_dir: str = ""
    data_dir_error: str = ""  # why it cannot be written; empty: it can
    free_bytes: int | None = None
    free_inodes: int | None = None
    environ: Mapping[str, str] = field(default_factory=dict)  # of this shell, or of the process given by --pid
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
    says: str
    fix: str = ""


def examine(facts: NodeFacts) -> tuple[NodeCheck, ...]:
    """Every check, in a fixed order."""
    parts = (
        *(_gpu, _kernel_log, _stacks, _processes, _agent, _probes, _socket, _storage, _nccl, _clock, _offsets),
        *(_pressure, _exits, _files),
    )
    return tuple(check for part in parts for check in part(facts))


def worst(checks: tuple[NodeCheck, ...]) -> CheckLevel:
    return max((c.level for c in checks), key=SEVERITY.index, default=CheckLevel.UNKNOWN)


def _well(name: str, says: str) -> NodeCheck:
    return NodeCheck(name=name, level=CheckLevel.OK, says=says)


def _gpu(f: NodeFacts) -> Iterator[NodeCheck]:
    there = max(f.gpu_devices, f.pci_gpus)
    if not there and not f.driver:
        yield _well("driver", "no NVIDIA GPU on this node")
        return
    if not f.driver:
        yield NodeCheck(
            name="driver",
            level=CheckLevel.BROKEN,
            says=f"{there} NVIDIA GPU(s) and no driver loaded",
            fix="load it (modprobe nvidia); the kernel log says why it is not loaded",
        )
    elif f.gpu_devices < f.pci_gpus:
        yield NodeCheck(
            name="driver",
            level=CheckLevel.WARNING,
            says=f"{f.pci_gpus} NVIDIA GPUs on the PCI bus, {f.gpu_devices} device files",
            fix="run nvidia-modprobe -u -c 0, or look at the kernel log for a GPU that did not come up",
        )
    else:
        yield _well("driver", f"driver {f.driver}, {f.gpu_devices} GPU(s)")
    if not f.nvml_wanted:
        yield _well("nvml", "not checked: gpu is disabled in agent.yaml")
    elif f.nvml:
        yield NodeCheck(
            name="nvml",
            level=CheckLevel.BROKEN,
            says=f"NVML cannot be used: {f.nvml}",
            fix="pip install 'rolecall[agent]'; in a container mount the driver's libnvidia-ml.so.1 "
            "(nvidia-container-toolkit); a version mismatch needs a reboot after a driver update",
        )
    else:
        yield _well("nvml", "NVML answers")


def _kernel_log(f: NodeFacts) -> Iterator[NodeCheck]:
    if not f.kernel_log or not f.kmsg:
        can = f"{f.kernel_log} can be read" if f.kernel_log else "not read: disabled in agent.yaml"
        yield _well("kernel_log", can)
        return
    yield NodeCheck(
        name="kernel_log",
        level=CheckLevel.WARNING,
        says=f"XIDs, OOM kills and link events are not seen: {f.kernel_log}: {f.kmsg}",
        fix="run the agent with CAP_SYSLOG (AmbientCapabilities=CAP_SYSLOG), or set kernel.dmesg_restrict=0, or name a "
        "file that a syslog daemon writes (kernel_log: {path: ...})",
    )


def _stacks(f: NodeFacts) -> Iterator[NodeCheck]:
    if not f.py_spy:
        yield NodeCheck(
            name="stacks",
            level=CheckLevel.WARNING,
            says="py-spy is not installed: no stacks of hung processes",
            fix="pip install 'rolecall[agent]'",
        )
    elif f.ptrace_scope == PTRACE_OFF:
        yield NodeCheck(
            name="stacks",
            level=CheckLevel.WARNING,
            says="kernel.yama.ptrace_scope is 3: no process can read stacks until the next boot",
            fix="set kernel.yama.ptrace_scope=1 in /etc/sysctl.d and reboot",
        )
    elif f.ptrace_scope and not f.is_root:
        yield NodeCheck(
            name="stacks",
            level=CheckLevel.WARNING,
            says=f"kernel.yama.ptrace_scope is {f.ptrace_scope}: py-spy reads only its own children without "
            f"CAP_SYS_PTRACE",
            fix="run the agent as root or with CAP_SYS_PTRACE, or set kernel.yama.ptrace_scope=0",
        )
    else:
        yield _well("stacks", "py-spy can read stacks" if f.is_root else "py-spy can read stacks of the same user")


def _processes(f: NodeFacts) -> Iterator[NodeCheck]:
    if f.hidepid and not f.is_root:
        yield NodeCheck(
            name="processes",
            level=CheckLevel.WARNING,
            says=f"/proc is mounted with hidepid={f.hidepid}: processes of other users are not seen",
            fix="run the agent as root or as the job's user, or mount /proc with gid= of a group that the agent is in",
        )


def _probes(f: NodeFacts) -> Iterator[NodeCheck]:
    for probe, reason in f.probes_down.items():
        yield NodeCheck(
            name="probe",
            level=CheckLevel.WARNING,
            says=f"the agent cannot read {probe}: {reason or 'no reason given'}",
            fix="grant its user the permission (docs/reference/agent.md, Permissions), or disable that section",
        )


def _socket(f: NodeFacts) -> Iterator[NodeCheck]:
    if f.rank_uid is None or f.socket_uid is None or f.rank_uid in (0, f.socket_uid):
        return
    yield NodeCheck(
        name="socket",
        level=CheckLevel.WARNING,
        says=f"the process runs as user {f.rank_uid}, but {f.data_dir}/agent.sock is only for user {f.socket_uid}: it "
        "cannot register",
        fix="run the agent as the job's user (systemd: DynamicUser=no, User=)",
    )


def _agent(f: NodeFacts) -> Iterator[NodeCheck]:
    if not f.agent:
        yield NodeCheck(
            name="agent",
            level=CheckLevel.WARNING,
            says=f"no agent listens at {f.agent_url}",
            fix="start it with `rolecall agent`; its log says why it ended",
        )
    elif f.agent != "ok":
        yield NodeCheck(
            name="agent",
            level=CheckLevel.BROKEN,
            says=f"{f.agent_url}: {f.agent}",
            fix="something else holds the port, or the agent is stuck: restart it, or give it another port",
        )
    elif not f.socket:
        yield NodeCheck(
            name="agent",
            level=CheckLevel.WARNING,
            says=f"the agent answers, but its socket {f.data_dir}/agent.sock does not exist",
            fix="give doctor the agent's own --config; if the directory was cleared, restart the agent",
        )
    else:
        yield _well("agent", f"the agent answers at {f.agent_url}")


def _storage(f: NodeFacts) -> Iterator[NodeCheck]:
    if f.data_dir_error:
        yield NodeCheck(
            name="data_dir",
            level=CheckLevel.BROKEN,
            says=f"{f.data_dir}: {f.data_dir_error}",
            fix="create it, owned by the agent's user, or set another one (data_dir)",
        )
    elif f.free_bytes is None:
        yield NodeCheck(
            name="data_dir",
            level=CheckLevel.UNKNOWN,
            says=f"{f.data_dir}: free space cannot be read",
            fix="run doctor as the agent's user",
        )
    elif f.free_bytes < FREE_BYTES_LOW or f.free_inodes == 0:
        level = CheckLevel.BROKEN if f.free_bytes < FREE_BYTES_MIN or f.free_inodes == 0 else CheckLevel.WARNING
        yield NodeCheck(
            name="data_dir",
            level=level,
            says=f"{f.data_dir}: {f.free_bytes >> 20} MiB and {f.free_inodes} inodes free: events will soon not be "
            f"stored",
            fix="free disk space",
        )
    else:
        yield _well("data_dir", f"{f.data_dir}: {f.free_bytes >> 30} GiB free")


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


def _nccl(f: NodeFacts) -> Iterator[NodeCheck]:
    found = False
    for names, says, fix in _HINDRANCES:
        for name in names:
            if f.environ.get(name, "").strip().lower() in _OFF:
                found = True
                yield NodeCheck(
                    name="nccl", level=CheckLevel.WARNING, says=f"{name}={f.environ[name]}: {says}", fix=fix
                )
    if not found:
        yield _well("nccl", "torch and NCCL settings allow diagnosis")


def _clock(f: NodeFacts) -> Iterator[NodeCheck]:
    if f.clock_state is None or f.clock_error_seconds is None:
        yield NodeCheck(
            name="clock",
            level=CheckLevel.UNKNOWN,
            says="the kernel does not report the clock's error",
            fix="in a container allow adjtimex, or run doctor on the node itself",
        )
    elif f.clock_state == TIME_ERROR:
        yield NodeCheck(
            name="clock",
            level=CheckLevel.WARNING,
            says="the kernel's clock is not synchronized",
            fix="start chronyd or systemd-timesyncd",
        )
    elif f.clock_error_seconds > CLOCK_ERROR_SECONDS_MAX:
        yield NodeCheck(
            name="clock",
            level=CheckLevel.WARNING,
            says=f"the clock may be wrong by {f.clock_error_seconds:.2f} s",
            fix="give chronyd a closer server; events on different nodes are ordered no better than this",
        )
    else:
        yield _well("clock", f"synchronized within {f.clock_error_seconds * 1000:.0f} ms")


def _offsets(f: NodeFacts) -> Iterator[NodeCheck]:
    apart = 0.0
    for o in f.clock_offsets:
        if o.seconds is None:
            yield NodeCheck(
                name="clocks",
                level=CheckLevel.UNKNOWN,
                says=f"{o.agent}: clock unknown: {o.reason}",
                fix="check that its agent runs and is reachable",
            )
            continue
        apart = max(apart, abs(o.seconds))
        if abs(o.seconds) - o.error_seconds > CLOCK_ERROR_SECONDS_MAX:
            way = "ahead of" if o.seconds > 0 else "behind"
            yield NodeCheck(
                name="clocks",
                level=CheckLevel.WARNING,
                says=f"{o.agent}: its clock is {abs(o.seconds):.2f} s {way} this node's",
                fix="start chronyd or systemd-timesyncd on both, with the same servers",
            )
    if f.clock_offsets and apart <= CLOCK_ERROR_SECONDS_MAX and all(o.seconds is not None for o in f.clock_offsets):
        yield _well("clocks", f"{len(f.clock_offsets)} other clock(s), within {apart * 1000:.0f} ms of this node's")


def _pressure(f: NodeFacts) -> Iterator[NodeCheck]:
    if f.pressure:
        yield _well("pressure", "/proc/pressure exists")
    else:
        yield NodeCheck(
            name="pressure",
            level=CheckLevel.WARNING,
            says="/proc/pressure does not exist: CPU, memory and disk pressure are not measured",
            fix="boot with psi=1 (kernel built with CONFIG_PSI)",
        )


def _exits(f: NodeFacts) -> Iterator[NodeCheck]:
    if not f.pidfd:
        yield NodeCheck(
            name="exits",
            level=CheckLevel.BROKEN,
            says="pidfd_open does not work: the agent cannot detect exits",
            fix="Linux 5.3 or newer; in a container a seccomp profile that allows pidfd_open",
        )
    elif _version(f.kernel) < EXIT_STATUS_KERNEL:
        yield NodeCheck(
            name="exits",
            level=CheckLevel.WARNING,
            says=f"Linux {f.kernel}: exit status unknown if the parent reaps a process before the agent",
            fix="use Linux 6.15 or newer; exits themselves are detected",
        )
    else:
        yield _well("exits", "exits and exit status are detected")


def _files(f: NodeFacts) -> Iterator[NodeCheck]:
    if f.files_soft < FILES_LOW:
        yield NodeCheck(
            name="files",
            level=CheckLevel.BROKEN if f.files_soft < FILES_MIN else CheckLevel.WARNING,
            says=f"{f.files_soft} open files allowed ({f.files_hard} at most): Ray and many ranks need more",
            fix="ulimit -n 65536, LimitNOFILE=65536 in the unit",
        )
    else:
        yield _well("files", f"{f.files_soft} open files allowed")


def _version(text: str) -> tuple[int, ...]:
    """`6.18.33-cloud` -> (6, 18)."""
    numbers = []
    for part in text.split(".")[:2]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        numbers.append(int(digits) if digits else 0)
    return tuple(numbers)


def lines(checks: tuple[NodeCheck, ...]) -> Iterator[str]:
    """As text: worst last, with the fix."""
    for check in sorted(checks, key=lambda c: SEVERITY.index(c.level)):
        yield f"{check.level:8} {check.name}: {check.says}"
        if check.fix:
            yield f"         -> {check.fix}"
