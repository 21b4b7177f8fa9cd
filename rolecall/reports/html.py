"""`report.html`: one page made from `report.json` alone. No script, no external resources, every text escaped.

It shows in this order: the verdict; what was learned; where and when faults struck; what was found, why, and what was
done; whether every group is accounted for; the environment of the measurements.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any

from rolecall.core.text import counted, escape, in_words, percent, seconds
from rolecall.reports.charts import evaluation_chart, key_of, lanes_chart, policy_health_chart, reward_chart, step_chart
from rolecall.reports.style import document
from rolecall.views.phases import LOST_LEAD, PHASES_LEAD, PhaseTime, phase_times

Report = Mapping[str, Any]


def render_html(report: Report) -> str:
    parts = [
        _header(report),
        _verdict(report),
        _figures(report),
        _charts(report),
        _incident_table(report),
        *[_incident(i, key_of(n)) for n, i in enumerate(report["incidents"])],
        *[_missed(f, key_of(len(report["incidents"]) + n)) for n, f in enumerate(report["missed"])],
        _phases(report),
        _lost(report),
        _audit(report),
        _proofs(report),
        _remarks(report),
        _measured(report),
    ]
    return document(str(report["run_id"]), "\n".join(p for p in parts if p))


def headline(report: Report) -> str:
    """The run in one sentence. Also the first line of the terminal's summary."""
    faults, first, last = report["faults_injected"], report["reward_first"], report["reward_last"]
    resolved = sum(
        1 + len(i["further_faults"])
        for i in report["incidents"]
        if i["fault"] is not None and i["outcome"] == "resolved" and i["resolved_at"] is not None
    )
    if faults and resolved == faults:
        what = f"{faults} of {faults} faults resolved" if faults > 1 else "The fault was resolved"
    elif faults:
        what = f"Only {resolved} of {faults} faults resolved"
    elif report["incidents"]:
        what = f"No fault injected, {counted(len(report['incidents']), 'incident')}"
    else:
        what = "No fault, no finding"
    alarms = len(report["false_alarms"])
    if faults and alarms:
        what += f", {alarms} false alarm{'s' if alarms > 1 else ''}"
    holds = "the audit holds" if report["audit"]["ok"] else "the audit fails"
    learned = "" if first is None or last is None else f"; reward went from {first:.2f} to {last:.2f}"
    return f"{what}, {holds}{learned}"


def _header(report: Report) -> str:
    when = datetime.fromtimestamp(float(report["started_at"]), UTC).strftime("%Y-%m-%d %H:%M UTC")
    steps = f"{report['num_steps']} steps in {seconds(report['wall_seconds'])}"
    used = [f"MFU of {role} {mfu['median']:.1%}" for role, mfu in report.get("mfu", {}).items()]
    facts = [*filter(None, [report["learns"]]), f"seed {report['seed']}", steps, *used, when]
    return (
        f'<header><p class="eyebrow">rolecall run {escape(report["run_id"])}</p>'
        f"<h1>{escape(headline(report))}</h1>"
        f'<p class="lead">{escape(" · ".join(facts))}</p></header>'
    )


def _verdict(report: Report) -> str:
    cells = []
    for row in report["verdict"]:
        mark, css = ("✓", "good") if row["ok"] else ("✕", "bad")
        word = "holds" if row["ok"] else "fails"
        cells.append(
            f'<div><b><span class="{css}" role="img" aria-label="{word}">{mark}</span> {escape(row["what"])}</b>'
            f"<span>{escape(row['because'])}</span></div>"
        )
    return f'<section class="card verdict" aria-label="verdict">{"".join(cells)}</section>'


def _figures(report: Report) -> str:
    incidents = report["incidents"]
    found = [i["detected_seconds"] for i in incidents if i["detected_seconds"] is not None]
    resolved = [i["resolved_seconds"] for i in incidents if i["resolved_seconds"] is not None]
    pace = report["seconds_to_n_steps"]
    base, estimate = pace["baseline"], pace["estimate"]
    if base is not None:
        beside = f"failure-free run: {seconds(base)}"
    else:
        beside = (
            f"without faults about {seconds(estimate)} (estimate)"
            if estimate is not None
            else "no failure-free run to compare with"
        )
    tokens_lost = sum(i["tokens_lost"] for i in incidents)
    tokens_kept = sum(i["tokens_kept"] for i in incidents)
    rows = [
        ("ETTR", _percent(report["ettr"]), f"failure-free run: {_percent(report['ettr_baseline'])}"),
        (f"Time to {pace['n']} steps", seconds(pace["this"]), beside),
        (
            "Fault to finding",
            seconds(median(found) if found else None),
            f"median of {len(found)}, worst {seconds(max(found, default=None))}",
        ),
        (
            "Finding to serving again",
            seconds(median(resolved) if resolved else None),
            f"median of {len(resolved)}, worst {seconds(max(resolved, default=None))}",
        ),
        ("Tokens lost", f"{tokens_lost:,}", f"{tokens_kept:,} moved to another engine"),
        ("Weights proven", str(report["weights_proven"]), "re-admissions, each with a proof"),
    ]
    cells = [f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd><dd>{escape(c)}</dd></div>" for a, b, c in rows]
    return f'<dl class="figures">{"".join(cells)}</dl>'


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _swatch(css: str, text: str, shape: str = "") -> str:
    drawn = shape or f'<rect class="{css}" x="1" y="1" width="20" height="10" rx="2"/>'
    return f'<li><svg viewBox="0 0 22 12" aria-hidden="true">{drawn}</svg>{escape(text)}</li>'


HEALTH_METRICS = (("entropy", "Entropy of the policy, nats per token"), ("response_length", "Tokens per response"))
"""A reward that rises while one of these diverges is not learning. The dashboard shows the other metrics."""


def _charts(report: Report) -> str:
    legend = "".join(
        (
            _swatch("bar", "first process of a replica"),
            _swatch("bar-new", "replacement"),
            _swatch("bar-standby", "warm standby"),
            _swatch("", "starting", '<rect class="bar-starting" x="1" y="4" width="20" height="4" rx="2"/>'),
            _swatch("undetected", "fault, not yet found"),
            _swatch("recovering", "found, in recovery"),
            _swatch("", "resolved", '<polygon class="resolved" points="11,0 17,6 11,12 5,6"/>'),
        )
    )
    cards = (
        ("Reward", reward_chart(report), ""),
        ("Reward on held-out prompts, with its 95 % interval", evaluation_chart(report), _evaluation(report)),
        *((title, policy_health_chart(report, metric, title), "") for metric, title in HEALTH_METRICS),
        ("Seconds from commit to commit", step_chart(report), ""),
        ("Replicas", lanes_chart(report), f'<ul class="legend">{legend}</ul>'),
    )
    drawn = "".join(
        f'<section class="card chart"><h3>{title}</h3><div class="scroll">{chart}</div>{below}</section>'
        for title, chart, below in cards
        if chart
    )
    lead = "Seconds since the run started. Each letter is a fault; its band spans the injection to the resolution."
    return f'<h2>What happened</h2><p class="lead">{lead}</p>{drawn}'


def _key(key: str, plain: bool = False) -> str:
    return f'<span class="key{" none" if plain else ""}">{escape(key)}</span>'


def _incident_table(report: Report) -> str:
    if not report["incidents"] and not report["missed"]:
        return '<h2>Incidents</h2><p class="lead">None: no fault was injected and none was found.</p>'
    head = ("Fault", "Suspects", "Found", "Requests resumed", "Step committed", "Serving again", "Verified", "Lost")
    rows = []
    for number, incident in enumerate(report["incidents"]):
        fault = incident["fault"]
        what = (
            f"{fault['kind']} on {fault['target']}"
            if fault
            else f"{in_words(incident['fault_class'])}, no injected fault"
        )
        lost = f"{incident['tokens_lost']:,} tokens, {incident['steps_lost']} steps"
        times = [incident[k] for k in ("detected_seconds", "requests_resumed_seconds", "step_committed_seconds")]
        times += [incident["serving_seconds"], incident["verified_seconds"]]
        cells = [_key(key_of(number), fault is None) + escape(what), escape(", ".join(incident["suspects"]) or "none")]
        rows.append((cells, [seconds(t) for t in times] + [lost]))
    for number, fault in enumerate(report["missed"], start=len(report["incidents"])):
        cells = [
            _key(key_of(number)) + escape(f"{fault['kind']} on {fault['target']}"),
            '<span class="bad">missed</span>',
        ]
        rows.append((cells, ["–"] * 5 + ["–"]))
    header = "".join(f'<th scope="col"{" class=n" if number > 1 else ""}>{h}</th>' for number, h in enumerate(head))
    body = "".join(
        "<tr>"
        + "".join(f"<td>{c}</td>" for c in cells)
        + "".join(f'<td class="n">{escape(t)}</td>' for t in times)
        + "</tr>"
        for cells, times in rows
    )
    lead = "“Found” counts from the fault in the injector's log; the other times from the finding."
    return (
        f'<h2>Incidents</h2><p class="lead">{lead}</p><div class="card scroll"><table><thead><tr>{header}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _incident(incident: Report, key: str) -> str:
    fault = incident["fault"]
    title = (
        f"{fault['kind']} on {fault['target']}"
        if fault
        else f"{in_words(incident['fault_class'])}: {', '.join(incident['suspects']) or 'no suspect'}"
    )
    css = "good" if incident["outcome"] == "resolved" else "bad"
    rows = [("Before that", earlier["because"]) for earlier in incident.get("before", ())]
    rows += [("Found", _found(incident)), ("Times", incident["durations"]), ("Plan", _plan(incident))]
    if incident["also_hit"]:
        rows.append(("Also hit", "; ".join(incident["also_hit"])))
    rows += [("Held", text) for text in incident["held"]]
    rows += [("Action failed", text) for text in incident["action_failed"]]
    rows += [("Replaced by", _replacement(r)) for r in incident["replacements"]]
    if incident["verified"]:
        rows.append(("Verified", incident["verified"]))
    if incident["closed_because"] and incident["closed_because"] not in (
        incident["verified"],
        incident["because"],
        incident["plan"],
    ):
        rows.append(("Closed", incident["closed_because"]))
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows)
    evidence = "".join(f"<li>{escape(e['text'])}</li>" for e in incident["evidence"])
    more = f"<details><summary>Evidence</summary><ul>{evidence}</ul></details>" if evidence else ""
    return (
        f'<article class="card incident"><header>{_key(key, fault is None)}<h3>{escape(title)}</h3>'
        f'<span class="tag {css}">{escape(in_words(incident["outcome"]))}</span></header>'
        f'<p class="because">{escape(incident["because"])}</p><dl class="steps">{listed}</dl>{more}</article>'
    )


def _found(incident: Report) -> str:
    named = {True: "correct suspect", False: "wrong suspect", None: "no fault was injected"}[
        incident["diagnosed_correctly"]
    ]
    return f"{named}; class {in_words(incident['fault_class'])}, confidence {incident['confidence']:.2f}"


def _plan(incident: Report) -> str:
    """Action and targets, with the reason if it adds to the diagnosis."""
    if not incident["action"]:
        return "none"
    what = f"{in_words(incident['action'])} {', '.join(incident['plan_targets'])}".strip()
    return what if incident["plan"] in ("", incident["because"]) else f"{what}: {incident['plan']}"


def _replacement(replacement: Report) -> str:
    origin = "the warm standby" if replacement["from_standby"] else "a new process"
    name = f"{replacement['replica']}#{replacement['incarnation']}"
    return f"{name}: {origin}, pid {replacement['pid']} on {replacement['node']}"


def _missed(fault: Report, key: str) -> str:
    title = f"{fault['kind']} on {fault['target']}"
    return (
        f'<article class="card incident"><header>{_key(key)}<h3>{escape(title)}</h3>'
        '<span class="tag bad">missed</span></header><p class="because">No incident belongs to this '
        "fault.</p></article>"
    )


def _phases(report: Report) -> str:
    """Where the time of the recoveries went; empty without any."""
    times = phase_times(report["recovery_phases"])
    if not times:
        return ""
    body = "".join(
        f"<tr><td>{escape(t.phase)}</td>"
        + "".join(f'<td class="n">{escape(text)}</td>' for text in _phase_cells(t))
        + "</tr>"
        for t in times
    )
    heads = ("Phase", "Recoveries", "Median", "Worst", "Sum", "Share")
    header = "".join(f'<th scope="col"{" class=n" if n else ""}>{h}</th>' for n, h in enumerate(heads))
    return (
        f'<h2>Where the time went</h2><p class="lead">{escape(PHASES_LEAD)}</p><div class="card scroll"><table>'
        f"<thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _phase_cells(t: PhaseTime) -> tuple[str, ...]:
    return (str(t.num), seconds(t.median_seconds), seconds(t.worst_seconds), seconds(t.total_seconds), percent(t.share))


def _lost(report: Report) -> str:
    """Replica-seconds by phase; empty if none were lost."""
    lost = report["lost_replica_seconds"]
    total = sum(filter(None, lost.values()))
    if not total:
        return ""
    rows = [
        (where, "–" if spent is None else f"{spent:,.1f} ({percent(spent / total)})") for where, spent in lost.items()
    ]
    return (
        f'<h2>Replica-seconds lost</h2><p class="lead">{escape(LOST_LEAD)}</p><div class="card scroll"><table><tbody>'
        f"{_rows([*rows, ('together', f'{total:,.1f}')])}</tbody></table></div>"
    )


def _rows(rows: Iterable[tuple[str, object]]) -> str:
    return "".join(f'<tr><td>{escape(name)}</td><td class="n">{escape(value)}</td></tr>' for name, value in rows)


def _list(texts: Sequence[str], css: str) -> str:
    return "".join(f'<p class="{css}">{escape(t)}</p>' for t in texts)


def _audit(report: Report) -> str:
    audit, pids = report["audit"], report["pids"]
    groups = [(name, f"{audit['groups_' + name]:,}") for name in ("issued", "trained", "dropped", "undone")]
    groups += [("trained twice", audit["duplicates"]), ("unaccounted", audit["unaccounted"])]
    groups += [(f"dropped because {reason}", n) for reason, n in audit["dropped_by_reason"].items()]
    heads = [
        (f"{name} head", f"{audit[f'{name}_head']['position']} · {audit[f'{name}_head']['hash'][:12]}")
        for name in ("journal", "ledger")
    ]
    rest = [
        *heads,
        ("anchors checked", audit["anchors"]),
        *_dataset_rows(report),
        ("processes that kept their PID", pids["num_kept"]),
        ("targets of plans", ", ".join(pids["named"]) or "none"),
    ]
    lead = (
        "Every prompt group is trained on once or dropped with a reason; a process that no plan targets keeps its PID."
    )
    return (
        f'<h2>Audit</h2><p class="lead">{lead}</p>'
        f"{_list(audit['problems'], 'bad')}{_list(pids['violations'], 'bad')}{_list(audit['notes'], 'muted')}"
        f'<div class="two"><div class="card"><table><tbody>{_rows(groups)}</tbody></table></div>'
        f'<div class="card"><table><tbody>{_rows(rest)}</tbody></table></div></div>'
    )


def _dataset_rows(report: Report) -> list[tuple[str, object]]:
    data = report.get("dataset")
    if not data:
        return []
    of = f"epoch {data['epoch'] + 1}, {data['epoch_share']:.0%} of its {data['rows']:,} rows"
    return [("rows of the dataset seen", f"{data['rows_seen']:,}"), ("progress in the dataset", of)]


def _evaluation(report: Report) -> str:
    text = evaluation_sentence(report)
    return f'<p class="muted">{escape(text)}</p>' if text else ""


def evaluation_sentence(report: Report) -> str:
    """First and last evaluation, also on the terminal's summary; empty without any."""
    points = [e for e in report.get("evaluations", ()) if e["reward"] is not None]
    if not points:
        return ""
    last = points[-1]
    passes = ", ".join(f"pass@{k} {share:.1%}" for k, share in last["pass_at"].items())
    missing = "; ".join(f"{num} not scored: {reason}" for reason, num in last["unscored"].items())
    within = "" if last["reward_low"] is None else f" ({last['reward_low']:.3f} to {last['reward_high']:.3f})"
    change = f"from {points[0]['reward']:.3f} at step {points[0]['step']} to " if len(points) > 1 else ""
    text = f"held-out reward {change}{last['reward']:.3f}{within} at step {last['step']}, {last['prompts']} prompts"
    return "; ".join(filter(None, (text, passes, missing)))


def _proofs(report: Report) -> str:
    back = [p for p in report["proofs"] if p["readmitted"] or p["problem"]]
    if not back:
        return ""
    head = ("Replica", "At", "Version", "From", "Bytes", "Tensors read back", "Not readable", "Manifest")
    body = ""
    for proof in back:
        uncovered = proof.get("uncovered") or []
        cells = (
            (f"{proof['replica']}#{proof['incarnation']}", ""),
            (seconds(proof["at"]), "n"),
            (proof["policy_version"], "n"),
            (proof.get("holder") or "", ""),
            (f"{int(proof.get('bytes') or 0):,}", "n"),
            (proof.get("covered", 0), "n"),
            (len(uncovered), "n"),
        )
        digest = proof["problem"] or str(proof.get("manifest_digest", ""))[-12:]
        row = "".join(f'<td class="{css}">{escape(text)}</td>' for text, css in cells)
        body += f'<tr>{row}<td class="hash {"bad" if proof["problem"] else "mono"}">{escape(digest)}</td></tr>'
    header = "".join(
        f'<th scope="col"{" class=n" if n in (1, 2, 4, 5, 6) else ""}>{h}</th>' for n, h in enumerate(head)
    )
    lead = (
        "A returning rollout serves only after it proves its weights: digests of the received bytes equal the "
        "manifest, its storage equals its peers', and its log-probabilities of the canary equal a certified replica's."
    )
    return (
        f'<h2>Weights proven</h2><p class="lead">{lead}</p><div class="card '
        f'scroll"><table><thead><tr>{header}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _remarks(report: Report) -> str:
    if not report["remarks"]:
        return ""
    body = "".join(
        f'<tr><td class="n">{seconds(r["at"])}</td><td>{escape(in_words(r["kind"]))}</td>'
        f"<td>{escape(r['what'])}</td><td>{escape(r['because'])}</td></tr>"
        for r in report["remarks"][:200]
    )
    return f'<h2>Also noted</h2><div class="card scroll"><table><tbody>{body}</tbody></table></div>'


def _measured(report: Report) -> str:
    env = report["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in env["packages"].items())
    pace = report["seconds_to_n_steps"]
    ettr = f"{_percent(report['ettr'])}; by the paper's formula alone {_percent(report['ettr_paper'])}"
    rows = [
        ("host", f"{env['cpus']} CPUs, {env['memory_gib']} GiB, {env['platform']}"),
        ("software", f"rolecall {report['rolecall']}, Python {env['python']}, {packages}"),
        ("configuration", report["config_digest"]),
        ("failure-free run", pace["baseline_run"] or "none with this configuration in this directory"),
        ("ETTR", f"{ettr}; start-up counted as lost {_percent(report['ettr_with_start'])}"),
    ]
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows)
    config = json.dumps(report["config"], indent=2, ensure_ascii=False)
    config = "\n".join(escape(line) for line in config.split("\n"))  # line by line, so that newlines survive
    return (
        f'<h2>Measured on</h2><div class="card"><dl class="steps">{listed}</dl>'
        f"<details><summary>Configuration</summary><pre>{config}</pre></details></div>"
        "<footer>ETTR: RobustRL, arXiv 2512.22492: while trainers recover and rollouts live, a window counts "
        "rollouts / (rollouts + trainers). rolecall also subtracts each lost rollout. "
        "Generated by rolecall from the run's journal and ledger.</footer>"
    )
