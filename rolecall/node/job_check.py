"""Checks of a job file against this machine (`rolecall doctor JOB`): does what its processes need at their peak fit?"""

from collections.abc import Sequence

from rolecall.core.config.job import DeviceName, JobConfig
from rolecall.core.text import counted
from rolecall.node.doctor import CheckLevel, NodeCheck
from rolecall.rl_runtime.memory_estimate import FreeMemory, ModelSize, RankNeed, gib, needs, shortages

NOUNS = {"reward": "worker", "controller": "process", "node": "node"}
DEVICE_FIX = "fewer replicas or ranks, a machine with more GPUs, or `make setup` for the other device"
FIX = (
    "fewer replicas or ranks, a smaller model, model.dtype: bfloat16, or lora; of one forward and backward pass: "
    "algorithm.microbatch_tokens_max, model.gradient_checkpointing"
)


def examine_job(
    job: JobConfig, size: ModelSize, free: FreeMemory, device: DeviceName = "cpu", lacking: Sequence[str] = ()
) -> tuple[NodeCheck, ...]:
    """What each role needs, then what does not fit. `lacking`: devices, each `path: reason`. Pure."""
    found = needs(job, size, device, free.gpus)
    checks = [
        NodeCheck(
            name=need.role,
            level=CheckLevel.OK,
            message=f"{counted(need.num_replicas, NOUNS.get(need.role, 'replica'))}, each needs {_each(need.ranks)}",
        )
        for need in found
    ]
    checks += [NodeCheck(name="devices", level=CheckLevel.BROKEN, message=text, fix=DEVICE_FIX) for text in lacking]
    if problems := shortages(job, size, free, device):
        checks += [NodeCheck(name="memory", level=CheckLevel.BROKEN, message=text, fix=FIX) for text in problems]
        return tuple(checks)
    has = f"this machine has {gib(free.host_bytes)} free"
    if device == "cuda":
        has += f", and its GPUs {', '.join(gib(gpu.free_bytes) for gpu in free.gpus) or '(not known)'}"
    needed = gib(sum(need.host_bytes for need in found))
    return (*checks, NodeCheck(name="memory", level=CheckLevel.OK, message=f"{needed} GiB together; {has}"))


def _each(ranks: tuple[RankNeed, ...]) -> str:
    """`2 x 41.0 GiB`, or one by one where ranks differ."""
    hosts, gpus = [gib(r.host_bytes) for r in ranks], [gib(r.device_bytes) for r in ranks]
    text = f"{_listed(hosts)} GiB"
    return text + f" and {_listed(gpus)} GiB of GPUs" if any(r.device_bytes for r in ranks) else text


def _listed(sizes: list[str]) -> str:
    if len(sizes) > 1 and len({*sizes}) == 1:
        return f"{len(sizes)} x {sizes[0]}"
    return " + ".join(sizes)
