"""Which pod or Slurm step holds a process, from the path of its cgroup. Pure.

    Kubernetes, systemd   0::/kubepods.slice/.../kubepods-burstable-pod1b4e28ba_2fa1_11d2_883f_0016d3cca427.slice/...
    Kubernetes, cgroupfs  0::/kubepods/burstable/pod1b4e28ba-2fa1-11d2-883f-0016d3cca427/3f...
    Slurm, cgroup v2      0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0
    Slurm, cgroup v1      4:memory:/slurm/uid_1000/job_4711/step_0/task_0

A process cannot leave the pod or the job that it was started in, so this is sure where a number in its environment, or
the name of its host, is not. In an agent of the same pod its own path is `/`, and nothing is known.
"""

import re
from collections.abc import Mapping

POD_UID = "pod_uid"
SLURM_STEP = "slurm_step"
"""`4711.0`; `4711.batch` for what the batch script itself started."""
_UID = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})(?![0-9a-f])")
_STEP = re.compile(r"/job_(\d{1,10})/step_(\d{1,10}|batch|extern|interactive)(?:/|$)", re.MULTILINE)


def workload_of(cgroup: str) -> Mapping[str, str]:
    """`cgroup`: the text of /proc/PID/cgroup. POD_UID and SLURM_STEP, as far as its path has them."""
    found: dict[str, str] = {}
    if pod := _UID.search(cgroup):
        found[POD_UID] = pod[1].replace("_", "-")
    if step := _STEP.search(cgroup):
        found[SLURM_STEP] = f"{step[1]}.{step[2]}"
    return found
