"""Why a worker of Ray ended: lines as Ray 2.60 writes them, of a real cluster on which each end was caused."""

import pytest

from rolecall.formats.ray_logs import RayReason, death_of, worker_of

STAMP = "[2026-11-28 03:10:10,941 I 25577 25601] raylet_ipc_client.cc:133: RayletIpcClient::Disconnect, "
END = ", has creation_task_exception_pb_bytes=0\n"
AFTER = "[2026-11-28 03:10:10,943 I 25577 25601] core_worker_shutdown_executor.cc:399: Disconnected.\n"
USUAL = "[2026-11-28 03:10:02,136 I 25392 25392] task_receiver.cc:117: Actor creation task finished, task_id: ff\n"
OWNER = (
    "Worker exits because the actor is killed. The actor is dead because its owner has died. Owner Id: f1c2 Owner Ip "
    "address: 192.0.2.2 Owner worker exit type: SYSTEM_ERROR Worker exit detail: Owner's worker process has crashed."
)
INIT = (
    "exit_type=USER_ERROR, exit_detail=Worker exits because there was an exception in the initialization method (e.g., "
    "__init__). Fix the exceptions from the initialization to resolve the issue. Exception raised from an actor init "
    "method. Traceback: The actor died because of an error raised in its creation task, \x1b[36mray::A.__init__()"
    "\x1b[39m (pid=25616, ip=192.0.2.2, actor_id=81d1, repr=<deaths.A object at 0x7f9eb18315d0>)\n"
    '  File "/job/deaths.py", line 9, in __init__\n    raise ValueError("no weights at /models/x")\n'
    "ValueError: no weights at /models/x, has creation_task_exception_pb_bytes=1034\n"
)
MEMORY = (
    "[2026-11-28 03:11:56,125 I 27321 27321] (raylet) node_manager.cc:3199: Killing 1 worker(s), kill details: Memory on "
    "the node (IP: 192.0.2.2, ID: 435a) was 7.81GB used / 23.54GB limit (0.331911)\n"
    "OOM kill reason: Memory usage 8337170432B exceeded threshold of 8336190464B (33.0% of 25276502016B limit)\n"
    "Ray killed 1 worker(s) based on the killing policy\nConsidered workers: [\n"
    "Selected to kill: (Actor(0b23): job ID=01000000, lease ID=0000, task name=A.__init__, required resources={}, "
    "pid=27669, actual memory used=0.06GB, worker ID=d885)\n]\n"
)


def intended(detail: str, kind: str = "INTENDED_SYSTEM_EXIT") -> str:
    return f"{USUAL}{STAMP}exit_type={kind}, exit_detail={detail}{END}{AFTER}"


KILL = "Worker exits because the actor is killed. The actor is dead because it was killed by `ray.kill`."
SCOPE = (
    "Worker exits because the actor is killed. The actor is dead because all references to the actor were removed "
    "including lineage ref count."
)
LEFT = "Worker exits by an user request. Worker exits with an exit code 0. exit_actor() is called."
CODE = "Worker exits unexpectedly. Worker exits with an exit code 3."


@pytest.mark.parametrize(
    ("log", "reason", "words"),
    [
        (intended(KILL), RayReason.RAY_KILL, "the job ended it with ray.kill"),
        (intended(OWNER), RayReason.OWNER_DIED, "has died (Owner's worker process has crashed)"),
        (intended(SCOPE), RayReason.OUT_OF_SCOPE, "dropped its last reference"),
        (intended(LEFT, "INTENDED_USER_EXIT"), RayReason.LEFT, "exit_actor() is called"),
        (intended(CODE, "SYSTEM_ERROR"), RayReason.EXITED, "exit code 3"),
        (USUAL + STAMP + INIT + AFTER, RayReason.CREATION_FAILED, "raised: ValueError: no weights at /models/x"),
        (USUAL, RayReason.NO_WORD, "Ray did not end it"),
        ("", RayReason.NO_WORD, "Ray did not end it"),
        ("\0\x1b[31m" * 100, RayReason.NO_WORD, "Ray did not end it"),
    ],
)
def test_what_the_worker_says_of_itself(log: str, reason: RayReason, words: str) -> None:
    found = death_of(log, "", pid=25577, raylet_lives=True)
    assert found.reason is reason and words in found.text and found.text.isprintable()


@pytest.mark.parametrize(("whose", "words"), [("owner", "that created it has died"), ("owner's node", "is gone")])
def test_a_signal_of_the_raylet_may_come_before_the_request_of_the_gcs(whose: str, words: str) -> None:
    signalled = intended("Worker exits unexpectedly by a signal. SystemExit is raised (sigterm).", "SYSTEM_ERROR")
    line = (
        f"[x] (raylet) node_manager.cc:1050: Killing leased worker because its {whose} died. worker_id=5d09 owner_w=f1"
    )
    for log in (signalled, USUAL):
        found = death_of(log, line, pid=7, raylet_lives=True, worker="5d09")
        assert found.reason is RayReason.OWNER_DIED and words in found.text
    assert death_of(signalled, line, pid=7, raylet_lives=True, worker="aaaa").reason is RayReason.TERMINATED


def test_the_memory_monitor_names_the_pid_that_it_killed() -> None:
    found = death_of(USUAL, MEMORY, pid=27669, raylet_lives=True)
    assert found.reason is RayReason.OUT_OF_MEMORY
    assert found.text.endswith("ran low: 7.81GB used / 23.54GB limit (0.331911)") and "8336190464B" in found.line
    assert death_of(USUAL, MEMORY, pid=2766, raylet_lives=True).reason is RayReason.NO_WORD
    assert death_of(USUAL, MEMORY, pid=7669, raylet_lives=True).reason is RayReason.NO_WORD


@pytest.mark.parametrize(
    ("raylet_log", "reason"),
    [
        ("", RayReason.NODE_LOST),
        ("[x] (raylet) main.cc: received SIGTERM. Existing local drain request = None\n", RayReason.NODE_STOPPED),
        (
            (
                "[x] (raylet) node_manager.cc:1: [Timeout] Exiting because this node manager has mistakenly been marked as "
                "dead by the GCS: GCS failed to check the health of this node for 5 times\n"
            ),
            RayReason.NODE_LOST,
        ),
    ],
)
def test_a_raylet_that_is_gone(raylet_log: str, reason: RayReason) -> None:
    found = death_of(USUAL, raylet_log, pid=7, raylet_lives=False, raylet_pid=99)
    assert found.reason is reason and "(pid 99)" in found.text
    lost = "[x] core_worker.cc:1075: Shutting down the core worker because the local raylet failed. Raylet pid: 99\n"
    assert death_of(USUAL + lost, raylet_log, pid=7, raylet_lives=True).reason is reason


def test_whether_ray_restarts_it_is_known_on_the_head() -> None:
    line = (
        "[x] (gcs_server) gcs_actor_manager.cc:1515: Actor is failed on worker d885 at node 94d1, need_reschedule = 1, "
    )
    log = f"{line}death context type = ActorDiedErrorContext, remaining_restarts = %d, num_restarts = 0\n"
    for number, words in ((0, "Ray does not restart it"), (1, "Ray restarts it"), (-1, "Ray restarts it")):
        found = death_of("", MEMORY, pid=27669, raylet_lives=True, gcs_log=log % number, worker="d885")
        assert found.text.endswith(words)
    other = death_of("", MEMORY, pid=27669, raylet_lives=True, gcs_log=log % 0, worker="aaaa")
    assert "restart" not in other.text


@pytest.mark.parametrize("phrase", ["x", "Memory on the node ", "Actor is failed on worker d885 ", "Killing "])
def test_a_long_line_is_read_in_one_go(phrase: str) -> None:
    """Without an end of line the work grew with the square of the length: minutes for 256 KiB."""
    long = phrase * (256 * 1024 // len(phrase))
    assert death_of(USUAL, long, pid=7, raylet_lives=False).text.endswith("Ray's workers end with it")
    for line in (f"{long}received sigterm", f"{long}\n[x] received SIGTERM\n{long}"):
        found = death_of(USUAL, line, pid=7, raylet_lives=False)
        assert found.reason is RayReason.NODE_STOPPED and found.line == line.split("\n")[line.count("\n") // 2][:400]
    found = death_of("", long + MEMORY, pid=27669, raylet_lives=True, gcs_log=long, worker="d885")
    assert found.reason is RayReason.OUT_OF_MEMORY and "7.81GB used" in found.text


def test_a_number_of_restarts_that_is_none() -> None:
    log = f"Actor is failed on worker d885 at node 94d1, remaining_restarts = {'9' * 5000}\n"
    assert "restart" not in death_of("", MEMORY, pid=27669, raylet_lives=True, gcs_log=log, worker="d885").text


def test_names_of_log_files() -> None:
    assert worker_of("python-core-worker-3237787a585d73afb309fc59_25392.log") == ("3237787a585d73afb309fc59", 25392)
    assert worker_of("python-core-driver-01000000ffffffffffffffff_25162.log") is None


def test_intended_ends_are_those_of_the_job_and_unknown_reasons_are_not() -> None:
    assert [r for r in RayReason if r.is_intended] == [
        *(RayReason.RAY_KILL, RayReason.OWNER_DIED, RayReason.OUT_OF_SCOPE, RayReason.LEFT),
        *(RayReason.TERMINATED, RayReason.NODE_STOPPED),
    ]
    assert RayReason("of a later version") is RayReason.NO_WORD
