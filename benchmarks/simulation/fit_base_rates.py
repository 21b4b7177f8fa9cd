"""Fits what `rolecall/simulate/settings.py` takes from a trace of faults: bursts, repeat offenders, repair time.

    python -m benchmarks.simulation.fit_base_rates [--data ../shared/data]

Reads `base-rates/fault_trace.json`: 584 faults of 400 GPU servers over 349 days (InfiniteHBD trace, SIGCOMM 2025,
Apache-2.0), each with server, class and the times in days when it began and ended. Without that folder it says so and
ends with 0. Failed stress tests, changes and tests are left out.

- *Bursts*: faults that begin within `BURST_SECONDS` of the one before are one burst; its size is its number of servers.
- *Repeat offenders*: a mixture of two Poisson distributions, fitted by maximum likelihood to the faults by server
  (servers without a fault included); faults of one server that overlap or follow within a day are one.
- *Repair*: median time from begin to end.

The report goes to benchmarks/results/.
"""

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks import common

NUM_SERVERS, NUM_DAYS = 400, 349.0
BURST_SECONDS = (1.0, 60.0, 300.0, 900.0)
"""Compared; the third is used: a switch and what hangs on it fail within minutes."""
BURST_USED = 300.0
REPEAT_DAYS_MIN = 1.0
"""A fault that follows sooner on the same server is the same fault."""
DAY_SECONDS = 86_400.0
NOT_OF_JOBS = ("Stress Test Failure", "Change", "Test")
"""Classes of the trace that no running job meets: they are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFault:
    """Times in days; `ended` is NaN if the trace does not have it."""

    server: str
    began: float
    ended: float
    level: str
    kind: str


def read(path: Path) -> list[TraceFault]:
    """Pairs each start with the next end of the same server and class."""
    open_faults: dict[tuple[str, str], list[float]] = {}
    found = []
    for event in sorted(
        json.loads(path.read_text()), key=lambda e: (e["event_time"], e["event_type"] != "fault_start")
    ):
        key = event["node_id"], json.dumps(event["fault_type"], sort_keys=True)
        if event["event_type"] == "fault_start":
            open_faults.setdefault(key, []).append(event["event_time"])
        elif open_faults.get(key):
            began = open_faults[key].pop(0)
            found.append(_made(key[0], key[1], began, event["event_time"]))
    for (server, kind), starts in open_faults.items():
        found += [_made(server, kind, at, math.nan) for at in starts]
    return sorted(found, key=lambda f: f.began)


def _made(server: str, kind: str, began: float, ended: float) -> TraceFault:
    described = json.loads(kind)
    return TraceFault(server=server, began=began, ended=ended, level=described["Level"], kind=described["Class"])


def burst_sizes(faults: Sequence[TraceFault], seconds: float) -> Counter[int]:
    """Number of servers -> number of bursts."""
    sizes = Counter[int]()
    servers: set[str] = set()
    before = -math.inf
    for fault in faults:
        if (fault.began - before) * DAY_SECONDS > seconds and servers:
            sizes[len(servers)] += 1
            servers = set()
        servers.add(fault.server)
        before = fault.began
    if servers:
        sizes[len(servers)] += 1
    return sizes


def faults_by_server(faults: Sequence[TraceFault], num_servers: int = NUM_SERVERS) -> list[int]:
    """Counts, largest first; faults of one server less than a day apart are one."""
    times: dict[str, list[float]] = {}
    for fault in faults:
        times.setdefault(fault.server, []).append(fault.began)
    counts = [1 + sum(b - a >= REPEAT_DAYS_MIN for a, b in pairwise(sorted(at))) for at in times.values()]
    return sorted([*counts, *[0] * (num_servers - len(counts))], reverse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offenders:
    """`share` of the servers fail `factor` times as often as the others. Log-likelihoods of the mixture and of equal
    servers."""

    share: float
    factor: float
    log_likelihood: float
    log_likelihood_equal: float


def fit_offenders(counts: Sequence[int], num_iterations: int = 500) -> Offenders:
    """Two Poisson rates by expectation maximization, from several starts."""
    mean = statistics.fmean(counts)
    servers = Counter(counts)  # number of faults -> of how many servers

    def log_poisson(n: int, rate: float) -> float:
        return n * math.log(rate) - rate - math.lgamma(n + 1)

    equal = sum(times * log_poisson(n, mean) for n, times in servers.items())
    best = Offenders(share=0.0, factor=1.0, log_likelihood=equal, log_likelihood_equal=equal)
    for first_factor in (2.0, 4.0, 8.0, 16.0):
        share, low, high = 0.1, mean / 2, mean * first_factor
        likelihood = -math.inf
        for _ in range(num_iterations):
            of_bad, faults_of_bad, likelihood = 0.0, 0.0, 0.0
            for n, times in servers.items():
                bad = math.log(share) + log_poisson(n, high)
                good = math.log1p(-share) + log_poisson(n, low)
                top = max(bad, good)
                total = math.exp(bad - top) + math.exp(good - top)
                likelihood += times * (top + math.log(total))
                weight = times * math.exp(bad - top) / total
                of_bad += weight
                faults_of_bad += weight * n
            share = min(0.5, max(1e-4, of_bad / len(counts)))
            high = faults_of_bad / max(1e-9, of_bad)
            low = max(1e-6, (sum(counts) - faults_of_bad) / max(1e-9, len(counts) - of_bad))
        if likelihood > best.log_likelihood:
            best = Offenders(share=share, factor=high / low, log_likelihood=likelihood, log_likelihood_equal=equal)
    return best


def report(faults: Sequence[TraceFault]) -> Iterator[str]:
    faults = [f for f in faults if f.kind not in NOT_OF_JOBS]
    yield f"{len(faults)} faults; levels: " + ", ".join(
        f"{level} {n}" for level, n in Counter(f.level for f in faults).most_common()
    )
    yield ""
    yield "## Bursts: servers whose faults begin one after another within a gap"
    yield ""
    yield "| gap, s | bursts | size: number |"
    yield "|---|---|---|"
    for seconds in BURST_SECONDS:
        sizes = burst_sizes(faults, seconds)
        shown = ", ".join(f"{size}: {n}" for size, n in sorted(sizes.items()))
        yield f"| {seconds:.0f} | {sum(sizes.values())} | {shown} |"
    yield ""
    yield "## Repeat offenders"
    yield ""
    counts = faults_by_server(faults)
    fitted = fit_offenders(counts)
    total, top = sum(counts), sum(counts[: NUM_SERVERS // 10])
    yield (
        f"Faults by server, at least a day apart: {total} on {sum(n > 0 for n in counts)} of {NUM_SERVERS} servers; "
        f"the tenth with the most faults has {100 * top / total:.1f} %; the largest count is {counts[0]}. Variance "
        f"over mean {statistics.variance(counts) / statistics.fmean(counts):.2f}."
    )
    yield ""
    yield (
        f"Mixture of two Poisson distributions: **{100 * fitted.share:.1f} % of the servers fail {fitted.factor:.1f} "
        f"times as often as the others**. Log-likelihood {fitted.log_likelihood:.1f}, of equal servers "
        f"{fitted.log_likelihood_equal:.1f}."
    )
    yield ""
    yield "## Rate and repair"
    yield ""
    hours = [24 * (f.ended - f.began) for f in faults if not math.isnan(f.ended)]
    low, middle, high = statistics.quantiles(hours, n=4)
    yield (
        f"{total / NUM_SERVERS / NUM_DAYS * 1000:.2f} faults per 1,000 server-days. Repair, of n={len(hours)}: median "
        f"**{middle:.1f} h**, quartiles {low:.1f} and {high:.1f} h, mean {statistics.fmean(hours):.1f} h."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=common.PUBLIC_DATA)
    args = parser.parse_args()
    path = args.data / "base-rates" / "fault_trace.json"
    if not path.is_file():
        print(f"{path} does not exist: nothing was fitted")
        return 0
    title = "Faults of 400 GPU servers: bursts, repeat offenders, repair"
    config = f"gap of a burst {BURST_USED:.0f} s; faults of one server at least {REPEAT_DAYS_MIN:.0f} day apart"
    lines = [*common.header(title, config, "none"), *report(read(path))]
    common.publish("base_rates", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
