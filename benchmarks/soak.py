"""Ten real seeds of each fault (`make soak`), and long failure-free runs (`make soak ARGS="--healthy 3 --minutes 20"`).

Every run is a whole `rolecall demo` in its own process, with the kernel's process state hidden from the detectors. The
kinds of hang and of slowness take turns over the seeds. One JSON line a run is added to `results/soak.jsonl`; the
report is made from the lines of the commit that is measured, so that counts add up over calls.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import common

HANGS = ("stop", "gil", "lock", "read")
SLOWS = ("duty", "delay", "quota")
LINES = common.RESULTS / "soak.jsonl"
RUN_MINUTES_MAX = 12.0


def faults_of(seed: int) -> str:
    return f"rollout-kill,trainer-hang:{HANGS[seed % len(HANGS)]},rollout-slow:{SLOWS[seed % len(SLOWS)]}"


def one_run(seed: int, faults: str, steps: int, minutes: float, extra: Sequence[str]) -> dict[str, Any]:
    """Runs the demo once and returns its line for the results file."""
    run_id = f"soak-{seed}-{int(time.time())}"
    argv = [sys.executable, "-m", "rolecall", "demo", "--seed", str(seed), "--faults", faults, "--id", run_id]
    argv += ["--steps", str(steps), "--minutes-max", str(minutes), "--plain", "--set", "detector.mask_proc_state=true"]
    began = time.monotonic()
    done = subprocess.run(
        [*argv, *extra], check=False, cwd=common.ROOT, capture_output=True, text=True, timeout=minutes * 60 + 300
    )
    path = common.ROOT / "runs" / run_id / "report.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    line = {
        "commit": common.commit(),
        "seed": seed,
        "faults": faults,
        "exit_code": done.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "wall_seconds": report.get("wall_seconds", 0.0),
        "incidents": report.get("incidents", []),
        "missed": report.get("missed", []),
        "false_alarms": report.get("false_alarms", []),
        "pids_kept": report.get("pids_kept"),
        "audit": report.get("audit"),
        "ettr": report.get("ettr"),
        "reward_first": report.get("reward_first"),
        "reward_last": report.get("reward_last"),
    }
    if done.returncode:
        line["output_tail"] = (done.stdout + done.stderr)[-2000:]
    return line


def poisson_upper(count: int, confidence: float = 0.95) -> float:
    """Exact upper bound of a Poisson mean after seeing `count` events (bisection on the distribution function)."""
    low, high = 0.0, 10.0 + 10.0 * count
    for _ in range(100):
        middle = (low + high) / 2
        below = sum(math.exp(-middle) * middle**k / math.factorial(k) for k in range(count + 1))
        low, high = (middle, high) if below > 1 - confidence else (low, middle)
    return high


def _times(found: Sequence[dict[str, Any]], name: str) -> str:
    return common.summary([i[name] for i in found if i[name] is not None])


def report(lines: Sequence[dict[str, Any]]) -> list[str]:
    """The table of the issue, from the lines of one commit."""
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        for incident in line["incidents"]:
            if incident.get("fault"):
                by_kind[incident["fault"]["kind"]].append({**incident, "run": line["seed"]})
    rows = [
        (
            "| fault | n | finding after, s | named right | step commits after the finding, s | replacement serves with proof "
            "after the finding, s | tokens not yet streamed lost | steps lost |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, found in sorted(by_kind.items()):
        named = sum(bool(i["named_right"]) for i in found)
        rows.append(
            f"| {kind} | {len(found)} | {_times(found, 'detected_seconds')} | {named} of {len(found)} | "
            f"{_times(found, 'step_committed_seconds')} | {_times(found, 'cured_seconds')} | "
            f"{sum(i['tokens_lost'] for i in found)} | {sum(i['steps_lost'] for i in found)} |"
        )
    missed = sum(len(line["missed"]) for line in lines)
    false = sum(len(line["false_alarms"]) for line in lines)
    healthy = [line for line in lines if line["faults"] == "none"]
    hours = sum(line["wall_seconds"] for line in healthy) / 3600
    alarms = sum(len(line["false_alarms"]) for line in healthy)
    rows += [
        "",
        f"{len(lines)} runs, {sum(line['exit_code'] == 0 for line in lines)} of them with exit code 0; missed faults {missed}; ",
    ]
    rows += [
        f"findings without a fault {false}; audits that hold {sum(bool(x['audit'] and x['audit']['ok']) for x in lines)}; "
    ]
    rows += [
        f"runs in which every process that no plan named kept its PID: {sum(bool(x['pids_kept']) for x in lines)}."
    ]
    if hours:
        rate = f"{alarms / hours:.2f}/h, 95 % upper bound {poisson_upper(alarms) / hours:.2f}/h"
        rows += ["", f"Failure-free: {hours:.2f} h in {len(healthy)} runs, {alarms} findings: {rate} (Poisson)."]
    return rows


def read_lines() -> Iterator[dict[str, Any]]:
    if LINES.exists():
        for text in LINES.read_text().splitlines():
            yield json.loads(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--healthy", type=int, default=0, help="this many failure-free runs instead")
    parser.add_argument("--minutes", type=float, default=20.0, help="length of a failure-free run")
    parser.add_argument("--faults", default="", help="instead of the usual three")
    args = parser.parse_args()
    LINES.parent.mkdir(parents=True, exist_ok=True)
    seeds = range(args.first_seed, args.first_seed + (args.healthy or args.seeds))
    for seed in seeds:
        if args.healthy:
            extra = ["--hold-minutes", str(args.minutes)]
            line = one_run(seed, "none", args.steps, args.minutes + RUN_MINUTES_MAX, extra)
        else:
            line = one_run(seed, args.faults or faults_of(seed), args.steps, RUN_MINUTES_MAX, [])
        with LINES.open("a") as f:
            f.write(json.dumps(line) + "\n")
        print(f"seed {seed}: exit {line['exit_code']} after {line['seconds']:.0f} s", flush=True)
    lines = [x for x in read_lines() if x["commit"] == common.commit()]
    text = common.header(
        "Soak: faults injected into real runs",
        "rolecall demo defaults, detector.mask_proc_state=true",
        f"{min(x['seed'] for x in lines)} to {max(x['seed'] for x in lines)}",
    ) + report(lines)
    path = common.write("soak", text)
    print("\n".join(text), f"\nwritten to {path.relative_to(common.ROOT)}", sep="\n")
    return 0 if all(x["exit_code"] == 0 for x in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
