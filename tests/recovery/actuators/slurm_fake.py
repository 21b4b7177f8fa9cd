"""Slurm's scontrol and scancel in memory, with the output of Slurm 22.05."""

import itertools
from dataclasses import dataclass, field

from rolecall.recovery.actuators.calls import Call, CommandCall, Reply
from tests.recovery.actuators.driving import NOW


@dataclass
class Job:
    """`start`: wall seconds. `array`: (ArrayJobId, ArrayTaskId). `steps`: number -> start."""

    number: int
    nodes: list[str]
    start: int = int(NOW) - 60
    state: str = "RUNNING"
    name: str = "rollout"
    restarts: int = 0
    requeue: int = 1
    batch: int = 1
    array: tuple[int, int] | None = None
    het: bool = False
    steps: dict[int, int] = field(default_factory=lambda: {0: int(NOW) - 50})

    @property
    def called(self) -> str:
        return f"{self.array[0]}_{self.array[1]}" if self.array else str(self.number)

    @property
    def shown(self) -> str:
        array = f" ArrayJobId={self.array[0]} ArrayTaskId={self.array[1]}" if self.array else ""
        het = f" HetJobId={self.number} HetJobOffset=0" if self.het else ""
        return (
            f"JobId={self.number}{array}{het} JobName={self.name}\n"
            "   UserId=root(0) GroupId=root(0) MCS_label=N/A\n"
            f"   JobState={self.state} Reason=None Dependency=(null)\n"
            f"   Requeue={self.requeue} Restarts={self.restarts} BatchFlag={self.batch} Reboot=0 ExitCode=0:0\n"
            f"   StartTime={self.start if self.state == 'RUNNING' else 'Unknown'} EndTime=Unknown Deadline=N/A\n"
            f"   ReqNodeList=(null) ExcNodeList=(null)\n"
            f"   NodeList={','.join(self.nodes) or '(null)'}\n"
        )

    def shown_step(self, number: int) -> str:
        return (
            f"StepId={self.number}.{number} UserId=0 StartTime={self.steps[number]} TimeLimit=UNLIMITED\n"
            f"   State=RUNNING Partition=p NodeList={','.join(self.nodes)}\n"
            "   Nodes=1 CPUs=1 Tasks=1 Name=python Network=(null)\n"
        )


class FakeSlurm:
    """`ended`: (job, start of the job or step) of what was requeued or cancelled; `drained`: nodes, in order."""

    def __init__(self, *jobs: Job) -> None:
        self.jobs = {job.number: job for job in jobs}
        self.nodes = {node: "MIXED" for job in jobs for node in job.nodes}
        self.ended: list[tuple[str, int]] = []
        self.drained: list[str] = []
        self.may_start = True
        self._starts = itertools.count(int(NOW) + 60)

    def reply(self, call: Call) -> Reply:
        assert isinstance(call, CommandCall) and call.environment["SLURM_TIME_FORMAT"] == "%s"
        status, text = self.run(call.argv)
        return Reply(status=status, text=text)

    def start_again(self, job: Job) -> None:
        """Requeued, by whoever it was."""
        job.restarts += 1
        job.start = next(self._starts)
        job.steps = {number: job.start for number in job.steps}
        job.state = "RUNNING"

    def run(self, argv: tuple[str, ...]) -> tuple[int, str]:
        match argv:
            case ("scontrol", "show", "job", number):
                found = [j for j in self.jobs.values() if int(number) in (j.number, (j.array or (0, 0))[0])]
                if not found:
                    return 1, "slurm_load_jobs error: Invalid job id specified\n"
                return 0, "\n".join(job.shown for job in found) + "\n"
            case ("scontrol", "show", "step", name):
                number, _, step = name.partition(".")
                job = self.jobs.get(int(number))
                if job is None or int(step) not in job.steps:
                    return 1, f"Job step {name} not found\n"
                return 0, job.shown_step(int(step))
            case ("scontrol", "show", "hostnames", nodes):
                return 0, nodes.replace(",", "\n") + "\n"
            case ("scontrol", "show", "node", name):
                if name not in self.nodes:
                    return 1, f"Node {name} not found\n"
                return (
                    0,
                    f"NodeName={name} Arch=x86_64 CoresPerSocket=1\n   State={self.nodes[name]} ThreadsPerCore=1\n",
                )
            case ("scontrol", "update", node, "state=drain", reason):
                assert reason.startswith("reason=rolecall inc-1-x: ")
                self.nodes[node.removeprefix("nodename=")] += "+DRAIN"
                self.drained.append(node.removeprefix("nodename="))
                return 0, ""
            case ("scontrol", "update", name, "starttime=now"):
                assert name.removeprefix("jobid=") in {j.called for j in self.jobs.values()}
                return (0, "") if self.may_start else (1, "Access/permission denied")
            case ("scontrol", "requeue", name):
                for job in self.jobs.values():
                    if name == job.called or (job.array and name == str(job.array[0])):
                        self.ended.append((job.called, job.start))
                        self.start_again(job)
                        job.state = "PENDING"
                return 0, ""
            case ("scancel", name):
                number, _, step = name.partition(".")
                job = self.jobs[int(number)]
                self.ended.append((name, job.steps.pop(int(step))))
                return 0, ""
        raise AssertionError(argv)
