"""What an engineer can do about a fault of a job that rolecall only watches. Pure."""

from rolecall.core.diagnosis import Diagnosis, Suspect
from rolecall.core.faults import FaultClass, Remedy
from rolecall.core.text import counted
from rolecall.detector.base.findings import EXIT, FULL_DISK, LOG_FILE, ORPHAN

WATCHED = "rolecall only watches this job"
"""First words of the plan for such a job."""
NUM_NAMED_MAX = 4
SIGKILL = 9.0


def what_to_do(diagnosis: Diagnosis) -> str:
    """The next step, for whoever runs the job, with ranks, processes and nodes."""
    fault, suspects = diagnosis.fault_class, diagnosis.suspects
    processes = [s for s in suspects if s.replica]
    nodes = ", ".join(dict.fromkeys(str(s.node) for s in suspects))
    if fault is FaultClass.HANG and processes:
        return _of_a_hang(diagnosis, processes)
    if {FULL_DISK, ORPHAN} & {*diagnosis.detectors}:
        return diagnosis.advice
    if fault in (FaultClass.CRASH, FaultClass.RESOURCE_EXHAUSTED):
        return _of_a_crash(diagnosis, processes) if processes else "restart the job"
    if fault is FaultClass.USER_CODE:
        return diagnosis.advice or fault.spec.advice
    if fault is FaultClass.SLOW and processes:
        return f"see what else runs on {nodes}; if it stays slow, restart the job without {nodes}"
    if fault.spec.remedy is Remedy.MOVE and nodes:
        return f"restart the job without {nodes} and have it checked (rolecall node burn-in)"
    if fault is FaultClass.CANNOT_TELL and len(processes) > 1 and diagnosis.advice in ("", fault.spec.advice):
        return (
            "wait for a second page, which follows if the stacks and dumps that are read now name a rank; if none "
            "comes within minutes, restart the job"
        )
    settle = f"; to settle it: {diagnosis.settle}" if diagnosis.settle else ""
    return f"{diagnosis.advice or fault.spec.advice}{settle}"


def _of_a_crash(diagnosis: Diagnosis, processes: list[Suspect]) -> str:
    """Names the file where the agent knows it."""
    files = list(dict.fromkeys(e.text for e in diagnosis.evidence if e.kind == LOG_FILE))[:NUM_NAMED_MAX]
    where = ", ".join(files) or "its launcher's output, or a file in the --log-dir of torchrun"
    advice = f"read the log of {_named(processes)} ({where}), then restart the job"
    exits = [e.values for e in diagnosis.evidence if e.kind == EXIT]
    if any(values.get("oom") for values in exits):
        return f"{advice} with more memory, or less use of it"
    if any(values.get("signal") == SIGKILL for values in exits):
        return (
            f"{advice}; signal 9 often comes from the kernel's out-of-memory killer: `dmesg` or `journalctl -k` on "
            f"{', '.join(dict.fromkeys(str(s.node) for s in processes))} says so"
        )
    return advice


def _of_a_hang(diagnosis: Diagnosis, processes: list[Suspect]) -> str:
    verb = "is" if len(processes) == 1 else "are"
    pids: dict[str, list[str]] = {}
    for s in processes[:NUM_NAMED_MAX]:
        if s.process is not None:
            pids.setdefault(str(s.node), []).append(str(s.process.pid))
    if "(state T)" in diagnosis.because and pids:
        commands = [
            f"kill -CONT {' '.join(here)} {'there' if len(pids) == 1 else f'on {node}'}" for node, here in pids.items()
        ]
        return f"{_named(processes)} {verb} stopped: {', '.join(commands)}, or restart the job"
    if "(state t)" in diagnosis.because:
        return f"{_named(processes)} {verb} held by a debugger or tracer: end that, or restart the job"
    return f"read the stack of {_named(processes)} (evidence of the incident, or py-spy dump), or restart the job"


def _named(processes: list[Suspect]) -> str:
    """`trainer/0 rank 1 (pid 27379) on vm`."""
    names = [
        f"{s.replica}{f' rank {s.rank}' if s.rank is not None else ''}{f' (pid {s.process.pid})' if s.process else ''} "
        f"on {s.node}"
        for s in processes[:NUM_NAMED_MAX]
    ]
    more = len(processes) - NUM_NAMED_MAX
    return ", ".join(names) + (f" and {counted(more, 'more process', 'more processes')}" if more > 0 else "")
