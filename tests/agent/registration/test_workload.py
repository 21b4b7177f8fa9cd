"""Pod and Slurm step of a process, from its cgroup."""

import pytest

from rolecall.agent.processes.workload import workload_of

UID = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        (f"0::/kubepods/burstable/pod{UID}/3f00aa", {"pod_uid": UID}),
        (
            f"0::/kubepods.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice/cri-containerd-3f.scope\n",
            {"pod_uid": UID},
        ),
        (f"0::/../../pod{UID}/3f00aa", {"pod_uid": UID}),
        (f"12:cpu:/kubepods/pod{UID}/a\n0::/kubepods/pod{UID}/a\n", {"pod_uid": UID}),
        # A container may make cgroups below its own.
        (f"0::/kubepods/pod{UID}/a/pod00000000-0000-0000-0000-000000000000", {"pod_uid": UID}),
        (
            "0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n",
            {"slurm_step": "4711.0"},
        ),
        ("4:memory:/slurm/uid_1000/job_4711/step_batch\n0::/\n", {"slurm_step": "4711.batch"}),
        ("0::/job_4711/step_0x", {}),
        ("0::/user.slice/user-1000.slice/session-4.scope\n", {}),
        ("0::/\n", {}),
        ("", {}),
    ],
)
def test_workload(cgroup: str, expected: dict[str, str]) -> None:
    assert workload_of(cgroup) == expected
