"""How many warm standby machines a role needs, by ByteRobust's rule (arXiv 2509.16293, section on warm standbys).

On a day each of N machines fails with probability p; standbys are the P99 of the binomial distribution (N, p). Table 5
of the paper (128, 256, 512 and 1,024 machines: 2, 2, 3 and 4) follows from p = 0.0012.
"""

import math
from collections.abc import Mapping

from rolecall.simulate.faults import ROLLOUT, TRAINER
from rolecall.simulate.settings import FaultSettings, SimulationSettings

QUANTILE = 0.99


def standby_pool(num_machines: int, daily_failure_probability: float, quantile: float = QUANTILE) -> int:
    """The smallest k with P(at most k of the machines fail on one day) >= `quantile`.

    Raises:
        ValueError: an argument is out of range.
    """
    n, p = num_machines, daily_failure_probability
    if n < 0 or not 0 <= p <= 1 or not 0 < quantile < 1:
        raise ValueError(f"{n} machines, probability {p}, quantile {quantile}: out of range")
    if p in (0.0, 1.0):
        return round(n * p)
    total = 0.0
    for k in range(n):
        log_choose = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        total += math.exp(log_choose + k * math.log(p) + (n - k) * math.log1p(-p))
        if total >= quantile:
            return k
    return n


def daily_failure_probability(faults: FaultSettings, per_gpu_hour: float, gpus_per_machine: int) -> float:
    """That one machine is lost on a day, alone or with its neighbours."""
    burst = sum(n * weight for n, weight in faults.burst_sizes.items()) / sum(faults.burst_sizes.values())
    return 1.0 - math.exp(-per_gpu_hour * gpus_per_machine * 24 * faults.machine_share * burst)


def standbys(settings: SimulationSettings) -> Mapping[str, int]:
    """Role -> standby machines: as configured, else by the rule."""
    faults, machines = settings.faults, settings.machines
    found = {}
    for role, size, per_gpu_hour, configured in (
        (TRAINER, settings.trainer, faults.trainer_per_gpu_hour, machines.trainer_standbys),
        (ROLLOUT, settings.rollout, faults.rollout_per_gpu_hour, machines.rollout_standbys),
    ):
        p = daily_failure_probability(faults, per_gpu_hour, settings.gpus_per_machine)
        found[role] = standby_pool(settings.machines_of(size), p) if configured is None else configured
    return found
