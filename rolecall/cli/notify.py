"""`rolecall notify test`: sends a test message over the channel that on-call is paged with."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from rolecall.cli.options import (
    ROOT,
    Commands,
    JsonOption,
    RootOption,
    RunArgument,
    RunOption,
    chosen_run,
    examples,
    show,
)
from rolecall.core.config.job import NotifyConfig, NotifyFormat, RecoveryConfig, load_job, parse_job
from rolecall.core.config.watched import load_watched
from rolecall.core.errors import ConfigError
from rolecall.core.text import plain

notify = Commands(no_args_is_help=True, help="Check the channel over which on-call is notified.")


@notify.command(
    name="test",
    epilog=examples(
        "rolecall notify test my-run",
        "rolecall notify test --job job.yaml",
        "rolecall notify test --config watch.yaml",
        "ROLECALL_NOTIFY_SECRET=... rolecall notify test --format pagerduty",
        "rolecall notify test --url http://alertmanager:9093/api/v2/alerts",
    ),
)
def notify_test(
    run: RunArgument = "",
    option: RunOption = "",
    job: Annotated[Path | None, typer.Option("--job", help="Job file, instead of a run.", metavar="FILE")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Watch file, instead of a run.", metavar="FILE")
    ] = None,
    url: Annotated[str, typer.Option("--url", help="Address, instead of a run or a file.", metavar="URL")] = "",
    form: Annotated[
        NotifyFormat, typer.Option("--format", help="Format; auto: by the URL.", case_sensitive=False)
    ] = NotifyFormat.AUTO,
    secret_file: Annotated[
        Path | None,
        typer.Option("--secret-file", help="File with the secret (default: ROLECALL_NOTIFY_SECRET).", metavar="FILE"),
    ] = None,
    runs: RootOption = ROOT,
    as_json: JsonOption = False,
) -> int:
    """Send a test message and, where the format has it, its resolution.

    Prints what was sent where, without secrets, and the answer. Exit code 1 if the service did not accept it."""
    from rolecall.recovery.notifications.delivery import send_test
    from rolecall.recovery.notifications.target import target_of

    direct = bool(url or secret_file) or form is not NotifyFormat.AUTO
    if (bool(run or option) + (job is not None) + (config is not None) + direct) > 1:
        raise ConfigError(["RUN, --job, --config, and --url with --format or --secret-file: give only one of them"])
    name = "test"
    if direct:
        secret = None if secret_file is None else str(secret_file)
        recovery = RecoveryConfig(notify=NotifyConfig(url=url or None, format=form, secret_file=secret))
    elif job is not None:
        loaded = load_job(job)
        recovery, name = loaded.recovery, loaded.name
    elif config is not None:
        recovery = load_watched(config).recovery
    else:
        found = chosen_run(runs, run, option)
        recovery, name = parse_job(found.config(), str(found.path / "run.json")).recovery, found.run_id
    target = target_of(recovery, os.environ)
    if target is None:
        raise ConfigError(["recovery.notify: no notification channel is configured"])
    results = send_test(target, name)
    value: dict[str, Any] = {
        "format": str(target.format),
        "url": target.shown,
        "messages": [dataclasses.asdict(result) for result in results],
    }
    lines = [f"{target.format}: {target.shown}"]
    lines += [f"  {r.what}: {'accepted' if r.accepted else 'NOT ACCEPTED'}, {r.answer}" for r in results]
    show(as_json, value, map(plain, lines))
    return 0 if all(r.accepted for r in results) else 1
