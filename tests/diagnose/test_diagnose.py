"""`rolecall diagnose` as a user calls it: exit codes, sentences, JSON, pages, and inputs that cannot be read."""

import gzip
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from rolecall.cli.main import main
from rolecall.core.clock import FakeClock
from rolecall.core.errors import UnreadableInput
from rolecall.detector.base.read_budget import ReadLimits
from rolecall.detector.panels.panel import Panel
from rolecall.detector.panels.registry import detector as named
from rolecall.detector.sources import recording
from rolecall.diagnose import diagnose as diagnosing
from rolecall.diagnose import standard_input
from rolecall.terminal import findings
from rolecall.terminal.console import as_text
from tests.detector.panel_data import noise

SHARED = Path(__file__).parents[3] / "shared" / "data"


def faulty() -> Panel:
    panel = noise()
    values = panel.values.copy()
    values[1, 560:, 3] += 6.0
    return replace(panel, values=values)


def saved(folder: Path, panel: Panel, name: str = "r.parquet") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    recording.write(folder / name, [panel])
    return folder / name


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main(["diagnose", "--no-sensitivity", *map(str, argv)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_fault_is_a_sentence_with_evidence_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, saved(tmp_path, faulty()))
    assert code == 1
    assert "slow: trainer/3 (node n003) of role trainer" in out and "m1: " in out and "above" in out
    assert "1 finding" in out and "8 machines, 6 metrics, 700 ticks of 1 s" in out
    assert "reading" in err and "reading" not in out


def test_a_healthy_recording_says_what_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, saved(tmp_path, noise()))
    assert code == 0 and out.startswith("healthy: nothing found in") and "8 machines" in out


def test_json_is_one_object_of_the_agreed_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, saved(tmp_path, faulty()), "--json")
    said = json.loads(out)
    assert code == 1 and err == ""
    [d] = said["diagnoses"]
    assert d["suspects"] == [{"node": "n003", "role": "trainer", "replica": "trainer/3", "rank": None, "gpu": None}]
    assert {"fault_class", "onset", "detected_at", "confidence", "because", "evidence", "advice"} <= set(d)
    assert [i["kind"] for i in said["inputs"]] == ["recording"]


def test_a_folder_is_searched_for_all_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "all" / "a", faulty())
    saved(tmp_path / "all" / "b" / "c", noise(seed=5), "other.bin")
    (tmp_path / "all" / "notes.txt").write_text("nothing\n")
    os.mkfifo(tmp_path / "all" / "pipe")
    code, out, _ = run(capsys, tmp_path / "all")
    assert code == 1 and "a/r.parquet" in out and "c/other.bin" in out and "2 files of unknown kind" in out
    assert "skipped notes.txt: text of no known form" in out and "skipped pipe: not a regular file" in out


def test_a_folder_of_which_nothing_can_be_read_is_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.log").touch()
    for n in range(diagnosing.NUM_SKIPPED_SHOWN + 2):
        (tmp_path / f"notes-{n:02}.txt").write_text("nothing\n")
    code, out, _ = run(capsys, tmp_path)
    assert code == 2 and "skipped empty.log: empty" in out and "skipped notes-00.txt: text of no known form" in out
    assert "skipped 3 more files" in out and "notes-21.txt" not in out and "holds no file of a known kind" in out


def test_explain_draws_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = run(capsys, saved(tmp_path, faulty()), "--explain", tmp_path / "why.html")
    page = (tmp_path / "why.html").read_text()
    assert code == 1 and page.count("<svg") >= 2 and "trainer/3" in page and "<script" not in page


@pytest.mark.parametrize("detector", ["sequential", "minder", "mahalanobis", "knn"])
def test_a_page_shows_the_score_that_decided(tmp_path: Path, detector: str) -> None:
    """Above its threshold at the decision; before the onset not, or not for long."""
    panel = noise(ticks=900)
    values = panel.values.copy()
    values[1, 610:, 3] += 9.0
    answer = diagnosing.diagnose([saved(tmp_path, replace(panel, values=values))], [named(detector)])
    [item, *_] = [x for x in diagnosing.explained(answer, [named(detector)]) if x.diagnosis.suspects[0].node == "n003"]
    assert item.score is not None
    above = item.score.score > item.score.threshold
    assert above[item.score.at == item.diagnosis.detected_at].all() and not above[600:609].all()


def test_a_page_is_not_written_under_the_name_of_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, saved(tmp_path, noise()), "--explain", tmp_path / "why.png")
    assert code == 2 and "why.png" in err and ".html" in err
    assert not (tmp_path / "why.png").exists()


def test_a_page_takes_the_place_of_a_file_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "why.html"
    os.mkfifo(page)
    code, out, err = run(capsys, saved(tmp_path, noise()), "--explain", page)
    assert (code, out) == (2, "") and f"--explain: {page} exists, is not a regular file" in err
    assert page.is_fifo()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("r.parquet", b"PAR1 and no more", "not a readable Parquet file"),
        ("r.txt", b"hello", "unknown kind of file"),
        ("r.json", b'{"entries": [', "r.json"),
    ],
)
def test_what_was_named_and_cannot_be_read_is_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    code, out, err = run(capsys, tmp_path / name)
    assert code == 2 and out == "" and said in err and name in err and "Traceback" not in err


def test_foreign_parquet_is_passed_over_in_a_folder_and_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, noise(ticks=50))
    pl.DataFrame({"timestamp": [1.0], "value": [2.0]}).write_parquet(tmp_path / "other.parquet")
    code, out, _ = run(capsys, tmp_path)
    assert code == 0 and "1 file of unknown kind" in out
    code, _, err = run(capsys, tmp_path / "other.parquet")
    assert code == 2 and "it has no column role, replica, node, metric" in err


def test_empty_folders_and_missing_paths_are_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, tmp_path)
    assert code == 2 and "holds nothing to diagnose" in err
    code, _, err = run(capsys, tmp_path / "nowhere")
    assert code == 2 and "no such file or folder" in err


def test_a_folder_that_cannot_be_looked_into_is_refused(tmp_path: Path) -> None:
    """What lies there may be the fault. (Root may look everywhere, but no one's path is longer than the system's
    limit.)"""
    saved(tmp_path, noise(ticks=50))
    above = os.open(tmp_path, os.O_RDONLY)
    for _ in range(17):
        os.mkdir("d" * 250, dir_fd=above)
        below = os.open("d" * 250, os.O_RDONLY, dir_fd=above)
        os.close(above)
        above = below
    os.close(above)
    with pytest.raises(UnreadableInput, match="it cannot be read: File name too long"):
        diagnosing.search([tmp_path])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--detector", "nope"), "none of sequential"),
        (("--false-alarms", "0"), "not within"),
        (("--model", "m"), "only minder has one"),
    ],
)
def test_senseless_options_are_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, str], said: str
) -> None:
    code, _, err = run(capsys, saved(tmp_path, noise(ticks=40)), *options)
    assert code == 2 and said in err


@pytest.mark.parametrize("machines", [1, 2])
def test_too_few_machines_cannot_be_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str], machines: int) -> None:
    code, out, _ = run(capsys, saved(tmp_path, noise(machines=machines, ticks=100)))
    assert code == 0 and "cannot tell" in out and "healthy" not in out


@pytest.mark.parametrize(("detector", "short"), [("sequential", 12), ("minder", 200), ("mahalanobis", 200)])
def test_a_recording_too_short_to_know_what_is_usual_is_not_called_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], detector: str, short: int
) -> None:
    for ticks, enough in ((short, False), (700, True)):
        path = saved(tmp_path, noise(ticks=ticks), f"{ticks}.parquet")
        code, out, _ = run(capsys, path, "--detector", detector, "--false-alarms", "1")
        assert code == 0 and out.startswith("healthy") == enough
        assert (f"cannot tell for role trainer: detector {detector} has not seen enough" in out) != enough


def test_names_from_a_recording_do_not_reach_the_terminal_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    panel = faulty()
    evil = replace(panel.shape.machines[3], node="n\x1b[31m3\nfake line")
    shape = replace(panel.shape, machines=(*panel.shape.machines[:3], evil, *panel.shape.machines[4:]))
    _, out, _ = run(capsys, saved(tmp_path, replace(panel, shape=shape)))
    assert "\x1b" not in out and "\nfake line" not in out and "fake line" in out


@pytest.mark.skipif(not SHARED.exists(), reason="no real recordings beside the project")
def test_real_recordings_the_straggler_is_named_and_a_healthy_cluster_is_healthy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, SHARED / "straggler", "--json")
    assert code == 1 and {s["node"] for d in json.loads(out)["diagnoses"] for s in d["suspects"]} == {"m00"}
    code, out, _ = run(capsys, SHARED / "exathlon" / "healthy-1_0_100000_15-w0" / "recording.parquet")
    assert code == 0 and "healthy" in out


def test_what_was_said_of_a_recording_cut_short_is_the_beginning_of_what_is_said_of_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    panel = noise(ticks=1000)
    values = panel.values.copy()
    values[1, 560:620, 3] += 6.0
    values[4, 920:, 6] -= 9.0  # later than what the first one does to its neighbours
    whole = replace(panel, values=values)
    _, out, _ = run(capsys, saved(tmp_path, whole), "--json")
    reported = json.loads(out)["diagnoses"]
    assert [d["suspects"][0]["node"] for d in reported] == ["n003", "n006"]
    for end in (580, 900, 950):
        part = Panel(shape=whole.shape, at=whole.at[:end], values=np.ascontiguousarray(whole.values[:, :end]))
        _, out, _ = run(capsys, saved(tmp_path / str(end), part), "--json")
        assert json.loads(out)["diagnoses"] == [d for d in reported if d["detected_at"] <= whole.at[end - 1]]


def dump(folder: Path, rank: int, *, enqueued: int, completed: int, num_groups: int = 1) -> Path:
    """A rank's status in a group of three, as NCCL's recorder has it, and more groups in which nothing was done."""
    status = {
        "last_enqueued_collective": enqueued,
        "last_started_collective": enqueued,
        "last_completed_collective": completed,
    }
    path = folder / f"nccl_trace_rank_{rank}"
    group = {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}
    groups = {str(n): {**group, "name": str(n)} for n in range(num_groups)}
    value = {"version": "2.9", "rank": rank, "pg_config": groups, "pg_status": {"0": status}, "entries": []}
    path.write_bytes(pickle.dumps(value, protocol=2))
    return path


def test_flight_recorder_dumps_name_who_holds_up_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        dump(tmp_path, rank, enqueued=6 if rank == 2 else 7, completed=6)
    code, out, _ = run(capsys, tmp_path, "--json")
    said = json.loads(out)
    assert code == 1 and [s["rank"] for d in said["diagnoses"] for s in d["suspects"]] == [2]
    assert said["inputs"][0]["kind"] == "flight recorder dumps"


@pytest.mark.parametrize(
    ("topology", "suspect", "named"),
    [
        (
            {"2": {"node": "m01", "replica": "trainer/1"}},
            ("m01", "trainer", "trainer/1"),
            "rank 2 of trainer/1 (node m01)",
        ),
        ({"2": {"node": "m01"}}, ("m01", "", ""), "rank 2 (node m01)"),
        ({"0": {"node": "m00"}}, ("rank-2", "", ""), "rank 2 has not"),
    ],
)
def test_a_topology_names_the_place_of_a_rank_that_dumps_accuse(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    topology: dict[str, dict[str, str]],
    suspect: tuple[str, str, str],
    named: str,
) -> None:
    for rank in range(3):
        dump(tmp_path, rank, enqueued=6 if rank == 2 else 7, completed=6)
    (tmp_path / "topology.json").write_text(json.dumps({"ranks": topology}))
    _, out, _ = run(capsys, tmp_path, "--json")
    [reported] = json.loads(out)["diagnoses"]
    [accused] = reported["suspects"]
    assert (accused["node"], accused["role"], accused["replica"]) == suspect and accused["rank"] == 2
    assert reported["because"].startswith(named)


def test_a_dump_cut_short_is_a_remark_and_one_that_attacks_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        dump(tmp_path, rank, enqueued=7, completed=6)
    whole = dump(tmp_path, 2, enqueued=7, completed=6)
    whole.write_bytes(whole.read_bytes()[:40])
    code, out, _ = run(capsys, tmp_path, "--json")
    assert code in (0, 1) and "nccl_trace_rank_2" in json.loads(out)["inputs"][0]["remarks"][0]
    whole.write_bytes(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")
    code, out, err = run(capsys, tmp_path, "--json")
    assert code == 2 and out == "" and "nccl_trace_rank_2" in err and "os.system" in err


def stack_dump(path: Path, frames: int) -> None:
    """Frames of names that are in no other file."""
    shown = [{"name": f"{path.stem}_{n}", "short_filename": "a.py"} for n in range(frames)]
    path.write_text(json.dumps([{"pid": 1, "thread_id": 1, "thread_name": "MainThread", "frames": shown}]))


def many(folder: Path, kind: str) -> None:
    """Four files of one kind, each of 19 to 30 kB of memory."""
    for n in range(4):
        if kind == "recording":
            saved(folder, noise(ticks=100), f"{n}.parquet")  # 8 machines, 6 metrics
        elif kind == "flight recorder":
            dump(folder, n, enqueued=7, completed=6, num_groups=40)
        else:
            stack_dump(folder / f"rank_{n}.json", 70)


@pytest.mark.parametrize("kind", ["recording", "flight recorder", "stacks"])
def test_all_files_of_a_kind_together_are_bounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    many(tmp_path, kind)
    assert run(capsys, tmp_path)[0] in (0, 1)
    answer = diagnosing.diagnose([tmp_path], [], limits=ReadLimits(kept_bytes_max=75_000))
    [said] = [r for i in answer.inputs for r in i.remarks if "GiB of memory" in r]
    assert said.startswith(f"cannot tell from {max(tmp_path.iterdir())}: with it 4 files would take more than")
    assert answer.verdict != "healthy"


def test_recordings_that_do_not_fit_take_nothing_from_the_others(tmp_path: Path) -> None:
    many(tmp_path, "recording")
    repeated = pl.concat([pl.read_parquet(tmp_path / "0.parquet")] * 5)  # as many values, and no more memory
    repeated.write_parquet(tmp_path / "0.parquet")
    answer = diagnosing.diagnose([tmp_path], [], limits=ReadLimits(kept_bytes_max=45_000))
    assert [Path(i.path).name for i in answer.inputs[:2]] == ["0.parquet", "1.parquet"] and len(answer.panels) == 2
    [said] = answer.inputs[2].remarks
    assert said.startswith(f"cannot tell from {tmp_path / '2.parquet'}: with it 3 files would take more than")
    assert "name fewer of them (2 files not read)" in said and answer.verdict == "cannot_tell"


def test_a_recording_that_is_too_large_is_named_and_the_others_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many(tmp_path, "recording")
    saved(tmp_path, noise(ticks=101), "1.parquet")
    monkeypatch.setattr(recording, "NUM_VALUES_MAX", 8 * 6 * 100)
    answer = diagnosing.diagnose([tmp_path], [])
    [said] = answer.inputs[1].remarks
    assert said.startswith(
        f"cannot tell from {tmp_path / '1.parquet'}: role trainer: 8 machines, 6 metrics and 101 ticks"
    )
    assert said.endswith("are left: cut it by time or by role") and len(answer.panels) == 3


def test_a_folder_of_very_many_files_or_folders_is_not_walked_to_its_end(tmp_path: Path) -> None:
    for n in range(5):
        (tmp_path / "a" / str(n)).mkdir(parents=True)
    stack_dump(tmp_path / "rank_0.json", 1)
    assert len(diagnosing.search([tmp_path], num_files_max=8).stacks) == 1
    with pytest.raises(UnreadableInput, match="more than 7 files and folders"):
        diagnosing.search([tmp_path], num_files_max=7)


def test_of_very_many_damaged_dumps_the_first_are_reported_and_the_others_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack_dump(tmp_path / "rank_0.json", 1)
    for n in range(1, 104):
        (tmp_path / f"rank_{n}.json").write_text('[{"thread_id": 1, "frames": [')
    _, out, _ = run(capsys, tmp_path)
    assert out.count("not JSON, or cut short") == 50 and "53 more files that cannot be read" in out
    assert "one process has no peers" in out


def recorded_as(value: float | None) -> pl.DataFrame:
    """Four machines, two metrics, 800 ticks, all of one value."""
    at = [float(t) for t in range(800)]
    rows = [(t, "trainer", f"trainer/{n}", f"n{n}", m, value) for t in at for n in range(4) for m in ("cpu", "gpu")]
    columns = ["timestamp", "role", "replica", "node", "metric", "value"]
    return pl.DataFrame(rows, schema=columns, orient="row", schema_overrides={"value": pl.Float32})


def without_evidence(folder: Path, case: str) -> None:
    match case:
        case "one machine" | "two machines":
            saved(folder, noise(machines=1 if case == "one machine" else 2))
        case "warming up":
            saved(folder, noise(ticks=12))
        case "constant":
            recorded_as(7.0).write_parquet(folder / "r.parquet")
        case "missing":
            recorded_as(None).write_parquet(folder / "r.parquet")
        case "unknown files":
            (folder / "notes.txt").write_text("nothing\n")
        case "log without the kernel":
            entry = {"__REALTIME_TIMESTAMP": "1700000000000000", "_TRANSPORT": "stdout", "MESSAGE": "started"}
            (folder / "journal.json").write_text(json.dumps(entry) + "\n")
        case "dumps without entries":
            for rank in range(3):
                dump(folder, rank, enqueued=0, completed=0)
        case "one dump of three":
            dump(folder, 0, enqueued=6, completed=6)
        case "no overlapping times" | "no common metric" | "values of one machine":
            panel = noise(machines=4, metrics=4, ticks=400)
            values = np.full_like(panel.values, np.nan)
            for n in range(4):
                if case == "no overlapping times":
                    values[:, 100 * n : 100 * (n + 1), n] = panel.values[:, 100 * n : 100 * (n + 1), n]
                elif case == "no common metric":
                    values[n, :, n] = panel.values[n, :, n]
                else:
                    values[:, : 400 if n == 2 else 5, n] = panel.values[:, : 400 if n == 2 else 5, n]
            saved(folder, replace(panel, values=values))
        case "header only":
            recorded_as(7.0).clear().write_parquet(folder / "r.parquet")
        case "beside a damaged log":
            saved(folder, noise(machines=6, metrics=2, ticks=80))
            (folder / "kern.log.gz").write_bytes(gzip.compress(b"[    1.000000] x\n" * 1000)[:30] + b"damaged")
        case "empty files":
            (folder / "dmesg.log").touch()
        case "one stack":
            stack_dump(folder / "rank_0.json", 3)
        case "one round of stacks":
            for rank in range(4):
                stack_dump(folder / f"rank_{rank}.json", 3)
        case "stacks without frames":
            stack_dump(folder / "rank_0.json", 0)
        case "answer without ranks" | "answer without communicators":
            listed = [{"hash": "0x1", "size": 0, "ranks": []}] if case == "answer without ranks" else []
            (folder / "ras.json").write_text(json.dumps({"nccl_version": "2.28.9", "communicators": listed}))
        case "text without communicators":
            (folder / "ras.txt").write_text("Job summary\n\nCommunicators...\n")
        case "inspector of one rank":
            header = {"id": "0x1", "rank": 0, "n_ranks": 1, "nnodes": 1}
            perf = {"coll": "AllReduce", "coll_sn": 1, "coll_exec_time_us": 9}
            (folder / "a.log").write_text(json.dumps({"header": header, "coll_perf": perf}) + "\n")
        case "start of an agent":
            event = {"seq": 1, "kind": "agent_started", "node": "n1", "wall_at": 1.0, "at": 1.0}
            (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
        case "one port":
            (folder / "node1" / "mlx5_0" / "ports" / "1").mkdir(parents=True)
            (folder / "node1" / "mlx5_0" / "ports" / "1" / "state").write_text("4: ACTIVE\n")
        case "topology":
            (folder / "topology.json").write_text(json.dumps({"ranks": {"0": {"node": "a"}}}))
        case _:
            raise AssertionError(case)


@pytest.mark.parametrize(
    ("case", "settled_by"),
    [
        ("one machine", "two more would settle it"),
        ("two machines", "a third would settle it"),
        ("warming up", "a longer time would settle it"),
        ("constant", "metrics that follow the work"),
        ("missing", "none of its 6,400 samples has a value"),
        ("unknown files", "it would be settled by a recording (Parquet)"),
        ("log without the kernel", "the output of `dmesg`"),
        ("dumps without entries", "TORCH_FR_BUFFER_SIZE"),
        ("one dump of three", "no dump of ranks 1 and 2"),
        ("no overlapping times", "times and metrics that overlap would settle it"),
        ("no common metric", "times and metrics that overlap would settle it"),
        ("values of one machine", "4 of its 4 machines"),
        ("header only", "it holds no sample"),
        ("beside a damaged log", "kern.log.gz"),
        ("empty files", "it would be settled by a recording (Parquet)"),
        ("one stack", "dumps of the others would settle it"),
        ("one round of stacks", "rounds, 10 s apart, would settle it"),
        ("stacks without frames", "no thread in it has a Python frame"),
        ("answer without ranks", "stacks of all ranks would settle it"),
        ("answer without communicators", "a report while it trains would settle it"),
        ("text without communicators", "a report while it trains would settle it"),
        ("inspector of one rank", "collect the files of all nodes"),
        ("start of an agent", "events of a run would settle it"),
        ("one port", "a second copy some minutes later, would settle it"),
        ("topology", "dumps of these ranks would settle it"),
    ],
)
def test_what_could_not_be_judged_is_not_healthy_and_says_what_would_settle_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, settled_by: str
) -> None:
    without_evidence(tmp_path, case)
    code, out, _ = run(capsys, tmp_path)
    nothing_read = case in ("unknown files", "header only", "empty files")
    assert code == (2 if nothing_read else 0), "what could not be judged is no fault"
    assert not out.startswith("healthy") and "cannot tell" in out and settled_by in out
    code, out, _ = run(capsys, tmp_path, "--json")
    said = json.loads(out)
    assert code == (2 if nothing_read else 0) and said["diagnoses"] == [] and said["verdict"] == "cannot_tell"
    [entry, *_] = said["cannot_tell"]
    assert settled_by in entry["because"] and (entry["path"], entry["kind"]) in {
        (i["path"], i["kind"]) for i in said["inputs"]
    }


@pytest.mark.parametrize(("panel", "verdict"), [(noise(), "healthy"), (faulty(), "fault")])
def test_json_says_healthy_only_of_what_was_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], panel: Panel, verdict: str
) -> None:
    _, out, _ = run(capsys, saved(tmp_path, panel), "--json")
    said = json.loads(out)
    assert said["verdict"] == verdict and said["cannot_tell"] == []


def test_one_metric_that_changes_is_enough_to_be_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    panel = noise()
    values = panel.values.copy()
    values[1:] = 3.0
    _, out, _ = run(capsys, saved(tmp_path, replace(panel, values=values)))
    assert "ever changes" not in out


def test_a_healthy_answer_says_which_effect_would_have_been_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosing, "SENSITIVITY_SECONDS", 600.0)
    path = saved(tmp_path, noise(machines=6, metrics=2, ticks=80))
    assert main(["diagnose", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("healthy: nothing found in") and "role trainer: a shift of" in out and "5 trials" in out
    answer = diagnosing.diagnose([path], [named()], sensitivity_seconds=60.0, clock=FakeClock())
    for effect in answer.to_dict()["smallest_effects"]:
        assert effect["panel"] == "role trainer" and effect["num_trials"] == 5
    assert {e.onset for e in answer.smallest_effects} == {"from the first sample on", "from the middle on"}


class SlowClock(FakeClock):
    """Passes a tenth of a second each time it is asked."""

    def monotonic(self) -> float:
        self.advance(0.1)
        return super().monotonic()


def test_an_effect_for_whose_trials_there_is_no_time_is_not_shown(tmp_path: Path) -> None:
    path = saved(tmp_path, noise(machines=6, metrics=2, ticks=80))
    answer = diagnosing.diagnose([path], [named()], sensitivity_seconds=5.0, clock=SlowClock())
    assert [e.num_trials for e in answer.smallest_effects] == [0, 0]
    text = as_text(findings.report(answer))
    assert "spreads" not in text and "trials" not in text
    assert "the smallest detectable shift was not measured (too little time): role trainer" in text


XID_LINE = "[  160.000001] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_standard_input_is_judged_like_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / "log"
    path.write_text(XID_LINE)
    with path.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        code, out, _ = run(capsys, name)
    assert code == 1 and "of node unknown (file standard input): XID 79" in out
    assert "\n    standard input: 1 file: 1 kernel line" in out


def test_standard_input_that_says_nothing_too_much_or_never_ends_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").write_text("hello\n")
    with (tmp_path / "log").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        code, _, err = run(capsys, "-")
        assert code == 2 and "rolecall: standard input: unknown kind of file" in err
        code, _, err = run(capsys, "-", tmp_path)
        assert code == 2 and "standard input is judged alone" in err
        monkeypatch.setattr(standard_input, "BYTES_MAX", 3)
        file.seek(0)
        code, _, err = run(capsys, "-")
        assert code == 2 and "rolecall: standard input: it is larger than" in err
    reader, writer = os.pipe()
    monkeypatch.setattr(standard_input, "SECONDS_MAX", 0.05)
    with os.fdopen(reader) as file, os.fdopen(writer, "w"):
        monkeypatch.setattr("sys.stdin", file)
        code, _, err = run(capsys, "-")
    assert code == 2 and "it does not end within" in err


def test_the_label_of_a_simulated_case_is_not_of_unknown_kind(tmp_path: Path) -> None:
    saved(tmp_path, noise(ticks=60))
    (tmp_path / "label.json").write_text("{}")
    assert [i.kind for i in diagnosing.diagnose([tmp_path], []).inputs] == ["recording"]


def test_no_effect_is_sought_where_there_is_a_fault_or_it_is_not_asked_for(tmp_path: Path) -> None:
    answer = diagnosing.diagnose([saved(tmp_path, faulty())], [named()], sensitivity_seconds=60.0)
    assert answer.verdict == "fault" and answer.smallest_effects == []
    answer = diagnosing.diagnose([saved(tmp_path, noise(ticks=100))], [named()])
    assert answer.verdict == "healthy" and answer.smallest_effects == []


def test_the_page_draws_the_panel_that_showed_the_fault(tmp_path: Path) -> None:
    panels = [replace(p, shape=replace(p.shape, phase=phase)) for p, phase in ((noise(), "fwd"), (faulty(), "sync"))]
    recording.write(tmp_path / "r.parquet", panels)
    answer = diagnosing.diagnose([tmp_path / "r.parquet"], [named("sequential")])
    [item] = diagnosing.explained(answer, [named("sequential")])
    assert item.panel is not None and item.panel.shape.phase == "sync"
