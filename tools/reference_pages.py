"""Generates the reference pages that come from code: `python -m tools.reference_pages` writes them, a test compares.

A page is added by one entry of `PAGES`. The command line is walked, so a new command needs no change here.
"""

import contextlib
import dataclasses
import inspect
import io
import json
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rolecall.agent.http.server import Endpoint

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
COMMAND = "python -m tools.reference_pages"


_EXIT_CODES = """Exit codes: 0 success; 1 a fault, a failed check or an incident left open; 2 wrong usage, a command
that is refused, or unreadable input; 3 a defect of rolecall; 130 interrupted.
"""


def cli_page() -> str:
    """`cli.md`: every command with its usage, help, arguments and options."""
    import typer

    from rolecall.cli.main import app

    root = typer.main.get_command(app)
    parts = [
        "# Command line\n",
        f"Generated from the command definitions by `{COMMAND}`.\n",
        _EXIT_CODES,
    ]
    parts += _command(root, ("rolecall",))
    return "\n".join(parts)


def _command(command: Any, path: tuple[str, ...]) -> Iterator[str]:
    from rolecall.cli.options import shown_name

    children: Mapping[str, Any] = getattr(command, "commands", {})
    if len(path) > 1:
        context = command.context_class(command, info_name=" ".join(path))
        yield f"{'##' if len(path) == 2 else '###'} `{' '.join(path)}`\n"
        yield _help(command.help) + "\n"
        yield f"```text\n{_usage(command.get_usage(context))}\n```\n"
        records = [r for p in command.params if (r := p.get_help_record(context)) is not None]
        if not command.params and not children:
            yield f"```text\n{_printed_help(path)}\n```\n"
        if records:
            rows = [f"| {_cell(f'`{shown_name(name)}`')} | {_cell(_escaped(text))} |" for name, text in records]
            yield "| parameter | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"
    for name in sorted(children):
        if not children[name].hidden:
            yield from _command(children[name], (*path, name))


def _printed_help(path: tuple[str, ...]) -> str:
    """What `--help` prints, for a command that parses its own arguments."""
    from rolecall.cli.main import main

    printed, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*path[1:], "--help"])
    finally:
        os.environ.pop("COLUMNS")
        os.environ.update({} if columns is None else {"COLUMNS": columns})
    return printed.getvalue().strip()


def _usage(text: str) -> str:
    """In one line."""
    return " ".join(text.split()[1:])


def _help(text: str | None) -> str:
    """Help text as Markdown: `\\b` blocks and indented examples become code blocks."""
    lines = inspect.cleandoc(text or "").replace("\b", "").splitlines()
    blocks, code = list[str](), list[str]()
    for line in [*lines, "end"]:
        if code and not line.strip():
            code.append("")
        elif line.startswith("  ") and line.strip():
            code.append(line)
        else:
            if code:
                blocks += ["```sh", *textwrap.dedent("\n".join(code)).strip().splitlines(), "```", ""]
                code = []
            blocks.append(_escaped(line))
    return "\n".join(blocks[:-1]).strip()


def _escaped(text: str) -> str:
    return re.sub(r"(?<!`)<([\w-]+)>(?!`)", r"`<\1>`", text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def job_file_page() -> str:
    """`job-file.md`: every section and field of a job file."""
    from rolecall.core.config.job import JobConfig

    head = f"""# Job file

Generated from `rolecall/core/config/` by `{COMMAND}`.

`rolecall run JOB.yaml` reads a YAML mapping. Every field has a default. Unknown keys are refused; all problems are reported
at once as `path: reason` with exit code 2, and nothing is started.

```yaml
name: parity
num_steps: 200
roles: {{trainer: 2, rollout: 3, reward: 2}}
recovery: {{mode: act, horizon_seconds: 3600, webhook_url: "http://127.0.0.1:9999/hook"}}
```

## Top level

"""  # noqa: E501
    return head + "\n".join(_section(JobConfig, ()))


def watch_file_page() -> str:
    """`watch-file.md`: the configuration of a watch over a job that rolecall did not start."""
    from rolecall.core.config.watched import WatchedConfig

    head = f"""# Watch file

Generated from `rolecall/core/config/{{watched,actuators}}.py` by `{COMMAND}`.

`rolecall watch agents AGENTS --config FILE` reads a YAML mapping. Unknown keys are refused; all problems are reported
at once as `path: reason` with exit code 2. How to use it: [replace a replica of a job that you already
run](../howto/replace.md).

```yaml
recovery: {{mode: approve}}
roles: [rollout]
actuator:
  kind: command
  replace: [ssh, "{{node}}", kill, "-KILL", "{{pid}}"]
```

## Top level

| field | type | default | meaning |
|---|---|---|---|
| `recovery` | section | mode observe | As in a [job file](job-file.md#recovery). Mode observe says what it would do. |
| `detector` | section | | As in a [job file](job-file.md#detector); `poll_seconds` 0.5, `first_unit_seconds` 1800. |
"""
    fields = {n: f for n, f in WatchedConfig.model_fields.items() if n not in ("recovery", "detector")}
    types = {n: _type(f) for n, f in fields.items()} | {"actuator": "section, by its `kind`, or null"}
    types |= {n: f"[section](#{n}) or null" for n in ("orphans", "nvsentinel")}
    rows = [f"| `{n}` | {types[n]} | {_default(f)} | {_cell(f.description or '')} |" for n, f in fields.items()]
    text = head + "\n".join(rows) + "\n"
    for actuator in _sections_in(fields["actuator"].annotation):
        kind = typing.get_args(actuator.model_fields["kind"].annotation)[0]
        text += "\n".join(_section(actuator, ("actuator", f"kind: {kind}"))) + "\n"
    for name in ("orphans", "nvsentinel"):
        (section,) = _sections_in(fields[name].annotation)
        text += "\n".join(_section(section, (name,))) + "\n"
    return text


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The models of a union, in their order."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for part in typing.get_args(annotation) for model in _sections_in(part)]


def simulation_file_page() -> str:
    """`simulation-file.md`: every field of the settings of a simulated run, and the default arms."""
    import yaml

    from rolecall.simulate.settings import ARMS, SimulationSettings

    default = SimulationSettings()
    implicit = default.detection.implicit
    arms = {name: arm.model_dump(mode="json", exclude_defaults=True) for name, arm in ARMS.items()}
    head = f"""# Simulation file

Generated from `rolecall/simulate/settings.py` by `{COMMAND}`.

`rolecall simulate run SETTINGS.yaml` and `rolecall doctor JOB --plan --settings SETTINGS.yaml` read a YAML mapping. A
default that comes from a publication names it: [Llama 3] arXiv 2407.21783, section 3.3.4; [ByteRobust] arXiv 2509.16293;
[RobustRL] arXiv 2512.22492; [trace] 584 faults of 400 GPU servers in 349 days (InfiniteHBD, SIGCOMM 2025; the fit is
`benchmarks/simulation/fit_base_rates.py`). What is simulated: [plan a fleet](../howto/plan.md).

Fields that say `required` are so only where their section is given; a section that is left out has a default as a whole.
`detection.implicit`: {implicit.trainer:g} s for trainers and {implicit.rollout:g} s for rollouts ([RobustRL]: TensorCore activity 0 for 5 min, throughput
0 for 60 s). `trainer`, `rollout`: {default.trainer.replicas} and {default.rollout.replicas} replicas. `arms`: those at the end of this page.

```yaml
mode: async
trainer: {{replicas: 16, gpus_per_replica: 128}}
rollout: {{replicas: 512, gpus_per_replica: 4}}
step_seconds: 240
detection: {{explicit_seconds: 1, implicit: {{trainer: 15, rollout: 10}}}}
arms:
  mine: {{fault_domain: replica, restart_trainer: 60, restart_rollout: 20, reconnect: {{trainer: 5, rollout: 5}}}}
```

## Top level

"""  # noqa: E501
    shown = yaml.safe_dump(arms, sort_keys=False)
    tail = f"""

## Arms compared by default

Sources: comments in `rolecall/simulate/settings.py`.

```yaml
{shown}```
"""
    return head + "\n".join(_section(SimulationSettings, ())) + tail


def agent_file_page() -> str:
    """`agent-file.md`: `agent.yaml` as `rolecall agent --explain` prints it, for root on a node called gpu-017."""
    from rolecall.agent.settings import explain

    printed = re.sub(r'^node: ".*"$', 'node: "gpu-017"', explain(), flags=re.MULTILINE)
    printed = re.sub(r"^data_dir: .*$", "data_dir: /var/lib/rolecall", printed, flags=re.MULTILINE)
    return f"""# Agent configuration file

Generated from `agent/settings.py` by `{COMMAND}`.

`rolecall agent --config agent.yaml` reads this file; `rolecall agent --explain` prints it. Every key has a default, and
unknown keys are refused with all problems at once. Command-line options override the file. What the collectors read:
[the node agent](agent.md).

```yaml
{printed}```
"""


def _section(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[str]:
    if path:
        yield f"\n## `{'.'.join(path)}`\n"
        own = inspect.getdoc(model) if model.__doc__ and model.__doc__ != BaseModel.__doc__ else ""
        if own:
            yield own + "\n"
    rows, nested = list[str](), list[tuple[str, type[BaseModel]]]()
    for name, field in model.model_fields.items():
        # A section may be optional: `data` or null.
        sections = [
            a
            for a in typing.get_args(field.annotation) or (field.annotation,)
            if isinstance(a, type) and issubclass(a, BaseModel)
        ]
        if sections:
            nested.append((name, sections[0]))
        else:
            rows.append(f"| `{name}` | {_type(field)} | {_default(field)} | {_cell(field.description or '')} |")
    if rows:
        yield "| field | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows)
    for name, inner in nested:
        yield from _section(inner, (*path, name))


def _type(field: FieldInfo) -> str:
    text = _type_name(field.annotation)
    names = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [f"{names[n]} {getattr(m, n)}" for m in field.metadata for n in names if getattr(m, n, None) is not None]
    return _cell(", ".join([text, *limits]))


def _type_name(annotation: Any) -> str:
    if annotation is None or annotation is type(None):
        return "null"
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{a}`" for a in typing.get_args(annotation))
    if typing.get_origin(annotation) is typing.Annotated:
        return _type_name(typing.get_args(annotation)[0])
    arguments = typing.get_args(annotation)
    if arguments and typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(_type_name(a) for a in arguments)
    if typing.get_origin(annotation) is tuple:
        return f"list of {_type_name(arguments[0])}"
    members = getattr(annotation, "__members__", None)
    if members is not None:
        return " or ".join(f"`{m.value}`" for m in members.values())
    names = {int: "integer", float: "number", str: "text", bool: "true or false"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "null"
    if value == "":
        return "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


_METRICS_HEAD = """# Metrics

Generated from `rolecall/core/metrics/` by `python -m tools.reference_pages`.

Each node's agent serves these metrics at `/metrics` in the Prometheus text format. `rolecall watch` serves the last two
tables with `--metrics`; for a run that rolecall started, `RUN/watch.json` holds the address. Units are base units.
Names of counters end in `_total`, and a counter of a process restarts at 0 with each incarnation of its replica. Labels
are bounded: `node`, `role`, `replica` and `rank` by the topology, `phase`, `state`, `probe` and `kind` by closed sets.
Metrics marked *detect* are also in `/v1/samples`, which the detector reads.

A watch derives its metrics on incidents and on the run from the journal, so every watch of a run reports the same
values and a restarted watch continues where its predecessor stopped. With several watches take the maximum, never the
sum. ETTR seconds are gauges, because a fault is found after its onset:
`delta(rolecall_run_effective_seconds[1h]) / delta(rolecall_run_training_seconds[1h])` is the ETTR of one hour. A job
that rolecall did not start has no run metrics except `rolecall_run_info`.

Policy-health metrics (entropy, clipped fractions, importance ratios, KL, lengths) describe the newest step: trainers
export them as `rolecall_train_*`, the journal's values appear as `rolecall_run_*`. They are means (`_max`: maxima) over
all tokens or answers of the step, on all replicas that trained it. A quantity that a step did not have is absent,
never 0.
"""


def metrics_page() -> str:
    """`metrics.md`: every metric, by what it describes."""
    from rolecall.core.metrics.catalogue import CATALOGUE
    from rolecall.core.metrics.metric import MetricScope

    titles = {
        MetricScope.PROCESS: "Processes",
        MetricScope.HOST: "Nodes",
        MetricScope.GPU: "GPUs",
        MetricScope.NETWORK: "Network",
        MetricScope.KERNEL: "Kernel log",
        MetricScope.STORAGE: "Disks and file systems",
        MetricScope.NCCL: "NCCL",
        MetricScope.ENGINE: "Inference engines",
        MetricScope.AGENT: "The agent itself",
        MetricScope.WATCH: "`rolecall watch`: itself and its incidents",
        MetricScope.RUN: "The run",
    }
    parts = [_METRICS_HEAD]
    for subject, title in titles.items():
        rows = [m for m in CATALOGUE if m.subject is subject]
        if not rows:
            continue
        parts.append(
            f"\n## {title}\n\n| metric | meaning | type | unit | labels | detect |\n|---|---|---|---|---|---|\n"
        )
        for m in rows:
            cells = (f"`{m.name}`", m.help, m.type, m.unit or "-", ", ".join(m.labels), "yes" if m.detect else "")
            parts.append("| " + " | ".join(cells) + " |\n")
    return "".join(parts)


_EVENTS_HEAD = """# Journal events

Generated from `rolecall/core/journal/payloads/` by `python -m tools.reference_pages`.

Every event has a position (`seq`, from 1), a `kind`, a time (`wall_at`, seconds since 1970), a `body` and a `hash` that covers
the event and all events before it. `incident_id` names its incident, `caused_by` the event that led to it; an event whose
`key` is already in the journal is not written again. The tables below give the fields of `body`. A body holds every field;
one without a default that is missing, an unknown field or a value of another type make the event unreadable. JSON has no NaN and
no infinity: such a number is stored as the string `nan`, `inf` or `-inf`.

A field that is added later has a default and keeps the version. Any other change raises the version, which the body then
holds as `schema`; a body of version 1 has no `schema`.
"""  # noqa: E501


def events_page() -> str:
    """`events.md`: every kind of event, and the fields of its body."""
    from rolecall.core.journal.payloads.contract import PAYLOADS, EventKind, plain_value

    parts = [_EVENTS_HEAD]
    for spec in (PAYLOADS[kind] for kind in EventKind):
        parts.append(f"\n## {spec.kind}\n\n{spec.summary}\n\nWritten by: {spec.owner}. Version {spec.version}.\n\n")
        parts.append("| field | type | default | meaning |\n|---|---|---|---|\n")
        hints = typing.get_type_hints(spec.payload, include_extras=True)
        for field in dataclasses.fields(spec.payload):
            *_, meaning = typing.get_args(hints[field.name])
            default = "" if field.default is dataclasses.MISSING else f"`{json.dumps(plain_value(field.default))}`"
            parts.append(f"| `{field.name}` | {_json_type(hints[field.name])} | {default} | {meaning} |\n")
    return "".join(parts)


_JSON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null", Any: "any"}


def _json_type(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _json_type(args[0])
    if origin is types.UnionType:
        return " or ".join(_json_type(a) for a in args)
    if origin is tuple and args[-1] is not Ellipsis:
        return f"({', '.join(_json_type(a) for a in args)})"
    if origin is tuple:
        return f"list of {_json_type(args[0])}"
    if origin is Mapping:
        return f"object of {_json_type(args[1])}"
    return _JSON_TYPES.get(hint) or f"`{hint.__name__}`"


def http_api_page() -> str:
    """`http-api.md`: every path of agent and watch, from the tables that serve them."""
    from rolecall.agent.http.routes import ENDPOINTS as AGENT
    from rolecall.watch.server import ENDPOINTS as WATCH

    def table(endpoints: Sequence[Endpoint]) -> str:
        rows = [
            f"| `{e.path}{'?' if e.query else ''}{e.query}` | {_cell(e.answer)}{'. Bearer token' if e.bearer else ''} |"
            for e in endpoints
        ]
        return "| path | answer |\n|---|---|\n" + "\n".join(rows)

    return f"""# HTTP API

Generated from `agent/http/routes.py` and `rolecall/watch/server.py` by `{COMMAND}`.

All paths are read-only (`GET`). Parameters that a path does not know are refused. Errors are `{{"error": reason}}` with
status 400, 401, 404, 405, 429, 500 or 503.

## Agent

Port 9477 on 127.0.0.1 by default; on another address `web_config_file` adds TLS and users in the format of Prometheus'
exporters. Answers carry the version of the wire format; agents and watches one version apart
understand each other.

{table(AGENT)}

Evidence needs `Authorization: Bearer VALUE`, even on loopback. VALUE is derived from the agent's token
([how](agent.md#security)).

```sh
curl -s http://127.0.0.1:9477/healthz
curl -s 'http://127.0.0.1:9477/v1/events?after=0' | python3 -m json.tool
```

## Watch

`rolecall watch run` serves on a free port of 127.0.0.1, written to `RUN/watch.json`; `--metrics HOST:PORT` chooses it,
and `--web-config` adds TLS and users. `rolecall watch agents` serves only with `--metrics`.

{table(WATCH)}

## Dashboard

`rolecall dashboard` serves web pages and no API: `/` (Overview), `/incidents`, `/incidents?incident=ID`, `/fleet`,
`/accounting` and `/operations`. Streamlit's own paths for uploads, metrics and OAuth are closed.
"""


PAGES: Mapping[str, Callable[[], str]] = {
    "agent-file.md": agent_file_page,
    "cli.md": cli_page,
    "events.md": events_page,
    "http-api.md": http_api_page,
    "job-file.md": job_file_page,
    "watch-file.md": watch_file_page,
    "metrics.md": metrics_page,
    "simulation-file.md": simulation_file_page,
}


def main() -> None:
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())


if __name__ == "__main__":
    main()
