"""The demo as a newcomer runs it, with an observer that checks the report."""

import json
from pathlib import Path

import pytest

from tests.e2e.runs import alive, check_no_false_alarm, demo_run, rolecall

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SEED = 47
"""Its faults come 3 to 4 s after the fleet is whole; others wait for up to 10."""
AGREEMENT_SECONDS = 1.0
"""Between taking a time and the row with it are a commit and, on a busy machine, other processes' turns. The
errors that this is to find (heartbeats or polls taken for events) are of several seconds."""
FAULT_CLASS = {"rollout-kill": "crash", "trainer-hang": "hang", "rollout-slow": "slow"}


def test_demo_resolves_three_faults_and_its_report_is_true(tmp_path: Path) -> None:
    args = ["--seed", str(SEED), "--steps", "60", "--set", "detector.mask_proc_state=true"]
    with demo_run(tmp_path, "three-faults", args) as run:
        code = run.wait(480)
        report = run.report()
        assert code == 0, run.output()[-3000:]
        assert alive(run.observer) == []

    check_no_false_alarm(report)
    incidents = report["incidents"]
    assert [i["fault"]["kind"] for i in incidents] == list(FAULT_CLASS)
    assert report["missed"] == []
    for incident in incidents:
        fault = incident["fault"]
        assert incident["fault_class"] == FAULT_CLASS[fault["kind"]], incident["because"]
        assert incident["suspects"] == [f"{fault['target']}#{fault['incarnation']}"], incident["because"]
        assert incident["action"] == "replace_replica"
        assert fault["target"] in incident["because"]

    assert run.observer.listening_elsewhere == set(), "a socket of the run listens beyond loopback"
    replacements = {run.observer.pids[key] for key in run.observer.serving if key[1] > 1}
    assert len(replacements) >= 3 and replacements <= run.observer.listeners, "the poll of sockets missed a replacement"

    # Every fault really happened: the injector's log names processes that the observer saw end.
    injections = [json.loads(line) for line in (run.path / "injections.jsonl").read_text().splitlines()]
    assert len(injections) == 3
    assert all(i["met"] for i in injections), "a fault did not come in the middle of the work that it was aimed at"
    victims = {(i["pid"], i["start_ticks"]) for i in injections}
    ended_at = {key: seen.last_at for key, seen in run.observer.processes.items() if key in victims}
    last_step_at = run.observer.steps[len(run.observer.steps) - 1]
    assert len(ended_at) == 3 and all(at < last_step_at for at in ended_at.values())

    assert report["pids_kept"] is True
    assert _who_left_early(run.observer, victims, injections[0]["injected_at"], last_step_at) == []

    audit = report["audit"]
    assert audit["ok"] and audit["duplicates"] == 0 and audit["unaccounted"] == 0
    algorithm = report["config"]["algorithm"]
    groups_per_step = algorithm["microbatches_per_step"] * algorithm["groups_per_microbatch"]
    assert audit["groups_trained"] == report["num_steps"] * groups_per_step
    assert report["reward_last"] > report["reward_first"] + 0.1
    assert report["weights_proven"] >= 2

    for incident in incidents:
        fault = incident["fault"]
        detected_at = fault["injected_at"] + incident["detected_seconds"]
        assert run.observer.opened[incident["incident_id"]].agrees(detected_at, AGREEMENT_SECONDS), incident
        served = run.observer.serving[(fault["target"], fault["incarnation"] + 1)]
        assert served.agrees(detected_at + incident["resolved_seconds"], AGREEMENT_SECONDS), incident

    assert not (run.path / "watch.json").exists(), "no watch serves any more"
    assert not (run.path / "prometheus" / "targets.json").exists(), "there is nothing more to scrape"
    html = (run.path / "report.html").read_text()
    assert "http://" not in html.replace("http://www.w3.org", "") and "https://" not in html.replace(
        "https://arxiv", ""
    )
    assert rolecall("audit", str(run.path)).returncode == 0


def _who_left_early(observer: object, victims: set[tuple[int, int]], since: float, until: float) -> list[str]:
    """Actors, raylets and agents that lived at the first injection and were gone before the last step, victims
    aside."""
    left = []
    for key, seen in observer.processes.items():  # type: ignore[attr-defined]
        # A child that an actor forks for a moment has its title until it becomes another program: it was no actor.
        lived_before, gone = seen.first_at < since - 1 and seen.last_at >= since, seen.last_at < until - 1
        is_ours = any(
            word in seen.title for word in ("ray::", "raylet", "rolecall.agent", "gcs_server", "rolecall watch")
        )
        if lived_before and gone and key not in victims and is_ours:
            left.append(f"{seen.pid} {seen.title[:60]} ended {until - seen.last_at:.1f} s before the last step")
    return left
