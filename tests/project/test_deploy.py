"""deploy/ says what the agent understands: its files load, and agree with each other in port, paths and names."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest
import yaml
from typer.main import get_command

from rolecall.agent.daemon import _parser
from rolecall.agent.daemon import main as agent_main
from rolecall.agent.settings import AgentFile, explain, load_agent_file
from rolecall.cli.watch import watch as watch_commands
from rolecall.core.config.actuators import KubernetesActuator
from rolecall.core.config.watched import load_watched, parse_watched
from rolecall.dashboards.grafana.rules import rules_yaml
from rolecall.watch.addresses import AGENT_JOB, WATCH_JOB, parse_address
from rolecall.watch.agents import AGENTS_MAX, ASK_SECONDS, CONCURRENT_REQUESTS, entries_of
from rolecall.watch.panels import authorization
from rolecall.watch.server import TICK_AGE_SECONDS_MAX
from tests.agent.processes import AgentProcess
from tests.recovery.actuators.kubernetes_schemas import SUPPORTED, problems

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "rolecall-agent.service"
DAEMONSET = DEPLOY / "kubernetes" / "agent-daemonset.yaml"
PROMETHEUS = DEPLOY / "prometheus.yaml"
EXPOSURE_TENTHS_MAX = 35
"""Of `systemd-analyze security`, 0 to 100: what a reader of other users' processes comes to. 31 when written."""


def _manifests() -> dict[str, Any]:
    """By kind; there is one of each."""
    found = {m["kind"]: m for m in yaml.safe_load_all(DAEMONSET.read_text())}
    assert sorted(found) == ["ConfigMap", "DaemonSet", "Namespace", "ServiceAccount"]
    return found


def _pod() -> dict[str, Any]:
    spec = _manifests()["DaemonSet"]["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def _container() -> dict[str, Any]:
    (container,) = _pod()["containers"]
    assert isinstance(container, dict)
    return container


def _pod_labels(path: Path) -> dict[str, str]:
    """Of the pods that a DaemonSet or Deployment makes."""
    (template,) = [
        m["spec"]["template"] for m in yaml.safe_load_all(path.read_text()) if "template" in m.get("spec", ())
    ]
    labels = template["metadata"]["labels"]
    assert isinstance(labels, dict)
    return labels


def _scraped_pods() -> dict[str, tuple[str, str]]:
    """Of the cluster's Prometheus: job -> the name label and the port of its pods."""
    found = {}
    for scrape in yaml.safe_load((DEPLOY / "kubernetes" / "prometheus.yaml").read_text())["scrape_configs"]:
        (pods,) = scrape["kubernetes_sd_configs"]
        assert pods == {"role": "pod", "namespaces": {"names": [_manifests()["Namespace"]["metadata"]["name"]]}}
        by_label, by_port, instance = scrape["relabel_configs"]
        assert by_label["action"] == by_port["action"] == "keep" and instance["target_label"] == "instance"
        found[scrape["job_name"]] = by_label["regex"], by_port["regex"]
    return found


PATIENT_SECONDS = 30
"""For a node that is busy: a restart of what watches it helps nobody."""


def _probe_seconds(probe: dict[str, Any]) -> float:
    """How long it must fail without a break until the container is ended."""
    return float(probe["periodSeconds"] * probe["failureThreshold"])


def _config_map(folder: Path) -> AgentFile:
    (name, text), *none = _manifests()["ConfigMap"]["data"].items()
    assert not none
    path = folder / name
    path.write_text(text)
    return load_agent_file(path)


def _unit() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None, strict=False)  # DeviceAllow comes twice
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text())
    return unit["Service"]


def _within(part: Any, whole: Any, path: str = "") -> list[str]:
    """Where `part` says something that `whole` does not."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return [
            wrong for k, v in part.items() for wrong in (_within(v, whole[k], f"{path}.{k}") if k in whole else [k])
        ]
    return [] if part == whole else [f"{path}: {part!r} is not {whole!r}"]


def test_the_example_is_a_part_of_what_explain_prints() -> None:
    example, printed = yaml.safe_load((DEPLOY / "agent.yaml").read_text()), yaml.safe_load(explain())
    assert _within(example, printed) == []
    defaults = AgentFile(node="x")
    assert load_agent_file(DEPLOY / "agent.yaml").model_copy(update={"node": "x"}) == defaults


def test_an_agent_starts_with_the_example(tmp_path: Path) -> None:
    agent = AgentProcess(tmp_path / "node", "--config", str(DEPLOY / "agent.yaml"), "--port", "0")
    try:
        assert agent.get("/healthz")[0] == 200
        assert "rolecall_agent_processes" in agent.get("/metrics")[1]
        assert agent.get("/metrics/dcgm")[0] == 200
    finally:
        agent.close()


# --- systemd ------------------------------------------------------------------------------------------------------


def test_the_unit_starts_the_agent_as_it_is() -> None:
    unit = _unit()
    program, *arguments = shlex.split(unit["ExecStart"])
    assert Path(program).name == "python" and arguments[:2] == ["-m", "rolecall.agent"]
    given = _parser().parse_args(arguments[2:])
    assert given.config == Path("/etc") / unit["ConfigurationDirectory"] / "agent.yaml"
    file = load_agent_file(DEPLOY / "agent.yaml")
    assert file.data_dir == Path("/var/lib") / unit["StateDirectory"]
    assert unit["Restart"] == "always" and unit["NoNewPrivileges"] == "yes" and unit["ProtectSystem"] == "strict"
    assert set(unit["AmbientCapabilities"].split()) == set(unit["CapabilityBoundingSet"].split())
    assert f"{file.kernel_log.path} r" in UNIT.read_text()


def test_the_socket_of_nvrx_is_where_the_unit_may_make_it_and_any_user_reach_it() -> None:
    unit, page = _unit(), (ROOT / "docs" / "howto" / "slurm.md").read_text()
    (example,) = [text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "node_health:" in text]
    socket = AgentFile.model_validate({"node": "x", **yaml.safe_load(example)}).node_health.socket
    assert socket is not None and socket.parent == Path("/run") / unit["RuntimeDirectory"]
    assert unit["RuntimeDirectoryMode"] == "0755" and unit["DynamicUser"] == "yes"
    assert f"--ft-node-health-check-endpoint {socket} " in page


def test_an_image_gets_nothing_that_git_ignores() -> None:
    """`COPY .` of the how-to on Kubernetes: the environment alone is gigabytes."""
    left_out = (ROOT / ".dockerignore").read_text().split()
    for line in (ROOT / ".gitignore").read_text().split():
        name = line.strip("/")
        assert {name, f"**/{name}"} & {*left_out}, line
    assert ".git" in left_out


def _systemd_analyze() -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze here: the Debian package `systemd` has it")
    return program


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit with a program that exists."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace("/opt/rolecall/bin/python", sys.executable))
    return path


def test_systemd_takes_the_unit(installed: Path) -> None:
    done = subprocess.run(
        [_systemd_analyze(), "verify", str(installed)], capture_output=True, text=True, timeout=60, check=False
    )
    ours = [line for line in done.stderr.splitlines() if installed.name in line]
    assert (done.returncode, ours) == (0, []), done.stderr


def test_the_unit_gives_away_no_more_than_it_must(installed: Path) -> None:
    command = [_systemd_analyze(), "security", "--offline=yes", f"--threshold={EXPOSURE_TENTHS_MAX}", "--no-pager"]
    done = subprocess.run([*command, str(installed)], capture_output=True, text=True, timeout=60, check=False)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze knows no --offline: 250 and later do")
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


# --- Kubernetes ---------------------------------------------------------------------------------------------------


def test_the_pods_configuration_is_one(tmp_path: Path) -> None:
    file = _config_map(tmp_path)
    mounts = {m["mountPath"]: m for m in _container()["volumeMounts"]}
    volumes = {v["name"]: v for v in _pod()["volumes"]}
    of_host_by_path = {file.proc: "/proc", file.sys: "/sys", file.rootfs: "/", file.kernel_log.path.parent: "/var/log"}
    for path, of_host in of_host_by_path.items():
        mount = mounts[str(path)]
        assert mount["readOnly"] is True and volumes[mount["name"]]["hostPath"]["path"] == of_host
    assert mounts[str(file.rootfs)]["mountPropagation"] == "HostToContainer"
    state = volumes[mounts[str(file.data_dir)]["name"]]
    assert state["hostPath"]["path"] == str(file.data_dir) and "readOnly" not in mounts[str(file.data_dir)]
    assert (
        volumes[mounts["/etc/rolecall"]["name"]]["configMap"]["name"] == _manifests()["ConfigMap"]["metadata"]["name"]
    )
    assert {m["name"] for m in mounts.values()} == set(volumes)


def _secret_file(pod: dict[str, Any], path: Path) -> tuple[str, str]:
    """Secret and key of a file in the pod's last container."""
    container = pod["containers"][-1]
    (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == str(path.parent)]
    (secret,) = [v["secret"] for v in pod["volumes"] if v["name"] == mount["name"]]
    assert mount["readOnly"] is True and "optional" not in secret, "without it an agent would make a token of its own"
    (key,) = [item["key"] for item in secret["items"] if item["path"] == path.name]
    return secret["secretName"], key


def test_the_watch_has_the_token_of_all_agents(tmp_path: Path) -> None:
    token_file = _config_map(tmp_path).token_file
    assert token_file is not None
    secret, key = _secret_file(_pod(), token_file)
    pod = _by_kind(WATCH)["Deployment"]["spec"]["template"]["spec"]
    (argument,) = [a for a in pod["containers"][0]["args"] if a.startswith("--credentials=")]
    of_watch = _secret_file(pod, Path(argument.partition("=")[2]))
    assert of_watch == (secret, "credentials") and key == "token"
    command = f"create secret generic {secret} --from-file={key} --from-file={of_watch[1]}"
    assert command in (ROOT / "docs" / "howto" / "kubernetes.md").read_text()


def test_the_secret_is_what_the_watch_sends_and_an_agent_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = AgentProcess(tmp_path / "node", "--config", str(DEPLOY / "agent.yaml"), "--port", "0")
    try:
        assert agent_main(["token", "--bearer", "--token-file", str(tmp_path / "token")]) == 0
        (tmp_path / "credentials").write_text(capsys.readouterr().out)
        header = authorization(tmp_path / "credentials", {})
        assert agent.get("/v1/evidence/nccl_ras")[0] == 401
        assert agent.get("/v1/evidence/nccl_ras", Authorization=header)[0] != 401
    finally:
        agent.close()


def test_the_pods_arguments_are_understood(tmp_path: Path) -> None:
    container = _container()
    assert container["command"] == ["python", "-m", "rolecall.agent"]
    known = {e["name"] for e in container["env"]}
    arguments = [
        a.replace("$(NODE_NAME)", "gpu-017.example").replace("$(NODE_IP)", "10.0.0.17") for a in container["args"]
    ]
    assert {"NODE_NAME", "NODE_IP"} <= known and not any("$(" in a for a in arguments)
    given = _parser().parse_args(arguments)
    assert (given.node, given.host) == ("gpu-017.example", "10.0.0.17")
    mounted = {m["mountPath"] for m in container["volumeMounts"]}
    assert str(given.config.parent) in mounted and given.config.name in _manifests()["ConfigMap"]["data"]


def test_probes_and_scrapes_meet_the_agents_port(tmp_path: Path) -> None:
    port = _config_map(tmp_path).port
    container = _container()
    (named,) = container["ports"]
    assert port == AgentFile(node="x").port == named["containerPort"] == named["hostPort"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": named["name"]}
    assert _probe_seconds(container["livenessProbe"]) > PATIENT_SECONDS
    assert _manifests()["DaemonSet"]["spec"]["selector"]["matchLabels"].items() <= _pod_labels(DAEMONSET).items()
    scraped = _scraped_pods()
    assert scraped["rolecall-agent"] == scraped["rolecall-dcgm"]
    assert scraped["rolecall-agent"] == (_pod_labels(DAEMONSET)["app.kubernetes.io/name"], named["name"])


def test_each_job_that_an_alert_names_is_scraped_in_the_cluster() -> None:
    scraped = _scraped_pods()
    (container,) = _by_kind(WATCH)["Deployment"]["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    assert scraped[WATCH_JOB] == (_pod_labels(WATCH)["app.kubernetes.io/name"], port["name"])
    alerts = " ".join(rules_yaml().values())
    named = re.findall(r'up\{job(?:=|=~)"([^"]+)"', alerts)
    assert len(named) == alerts.count("up{job") >= 2
    for jobs in named:
        assert set(jobs.split("|")) & set(scraped), jobs


def test_the_pod_gets_no_more_than_it_must() -> None:
    manifests, pod, security = _manifests(), _pod(), _container()["securityContext"]
    assert manifests["ServiceAccount"]["automountServiceAccountToken"] is pod["automountServiceAccountToken"] is False
    assert pod["serviceAccountName"] == manifests["ServiceAccount"]["metadata"]["name"]
    assert pod["hostPID"] is True and pod["hostNetwork"] is True and "hostIPC" not in pod
    assert security["privileged"] is security["allowPrivilegeEscalation"] is False
    assert security["readOnlyRootFilesystem"] is True
    assert security["capabilities"] == {"drop": ["ALL"], "add": ["SYS_PTRACE", "DAC_READ_SEARCH"]}
    assert _container()["resources"]["limits"] == {"cpu": "100m", "memory": "128Mi"}
    namespaced = [m for m in manifests.values() if m["kind"] != "Namespace"]
    assert {m["metadata"]["namespace"] for m in namespaced} == {manifests["Namespace"]["metadata"]["name"]}


WATCH = DEPLOY / "kubernetes" / "watch-deployment.yaml"
RBAC = DEPLOY / "kubernetes" / "watch-rbac.yaml"
NVSENTINEL = DEPLOY / "kubernetes" / "watch-rbac-nvsentinel.yaml"
SIDECAR = DEPLOY / "kubernetes" / "ray-sidecar.yaml"
KUSTOMIZATION = DEPLOY / "kubernetes" / "kustomization.yaml"


def _by_kind(path: Path) -> dict[str, Any]:
    return {m["kind"]: m for m in yaml.safe_load_all(path.read_text())}


def test_the_base_has_each_manifest_that_is_applied_and_no_example() -> None:
    base = yaml.safe_load(KUSTOMIZATION.read_text())
    assert (base["apiVersion"], base["kind"]) == ("kustomize.config.k8s.io/v1beta1", "Kustomization")
    assert all((KUSTOMIZATION.parent / name).is_file() for name in base["resources"])
    others = {KUSTOMIZATION.name, SIDECAR.name, "prometheus.yaml", NVSENTINEL.name}
    assert {*base["resources"], *others} == {p.name for p in KUSTOMIZATION.parent.iterdir()}
    seen = [
        (m["apiVersion"], m["kind"], m["metadata"].get("namespace", ""), m["metadata"]["name"])
        for name in base["resources"]
        for m in yaml.safe_load_all((KUSTOMIZATION.parent / name).read_text())
    ]
    assert len(set(seen)) == len(seen), "no object is there twice"


def test_kustomize_builds_the_base() -> None:
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("no kubectl here")
    command = [program, "kustomize", str(KUSTOMIZATION.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    built = [m["kind"] for m in yaml.safe_load_all(done.stdout)]
    assert sorted(built) == sorted(
        m["kind"]
        for name in yaml.safe_load(KUSTOMIZATION.read_text())["resources"]
        for m in yaml.safe_load_all((KUSTOMIZATION.parent / name).read_text())
    )


def test_the_watch_is_started_as_it_is(tmp_path: Path) -> None:
    manifests = _by_kind(WATCH)
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    program, watch, agents, *arguments = [*container["command"], *container["args"]]
    assert (program, watch, agents) == ("rolecall", "watch", "agents")
    commands: Any = get_command(watch_commands)  # of the click that typer brings
    given = commands.commands["agents"].make_context("agents", list(arguments)).params
    files = manifests["ConfigMap"]["data"]
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    volumes = {v["name"]: v for v in pod["volumes"]}
    for path in (Path(given["agents"]), given["config"]):
        assert path.name in files and volumes[mounts[str(path.parent)]]["configMap"]["name"] == "rolecall-watch"
        (tmp_path / path.name).write_text(files[path.name])
    assert entries_of(tmp_path / "nodes.yaml") == ["http://gpu-001:9477", "http://gpu-002:9477"]
    watched = load_watched(tmp_path / "watch.yaml")
    assert watched.recovery.mode == "observe" and watched.actuator is not None
    claim = manifests["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes[mounts[str(given["runs"].parent)]]["persistentVolumeClaim"]["claimName"] == claim
    (port,) = container["ports"]
    assert parse_address(given["metrics"])[1] == port["containerPort"]
    assert {*mounts.values()} == {*volumes}


def test_a_watch_that_hangs_is_restarted_and_one_that_starts_slowly_is_not() -> None:
    (container,) = _by_kind(WATCH)["Deployment"]["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    asks_all = AGENTS_MAX / CONCURRENT_REQUESTS * ASK_SECONDS
    assert _probe_seconds(container["startupProbe"]) > asks_all, "it serves once each agent was asked for its name"
    assert _probe_seconds(container["livenessProbe"]) >= 10 * TICK_AGE_SECONDS_MAX


def test_the_watch_may_do_what_its_role_grants_and_no_more() -> None:
    manifests, rbac = _by_kind(WATCH), _by_kind(RBAC)
    deployment = manifests["Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == rbac["ServiceAccount"]["metadata"]["name"]
    assert {m["metadata"]["namespace"] for m in manifests.values()} == {rbac["ServiceAccount"]["metadata"]["namespace"]}
    watched = parse_watched(yaml.safe_load(manifests["ConfigMap"]["data"]["watch.yaml"]))
    assert isinstance(watched.actuator, KubernetesActuator)
    assert watched.actuator.namespace == rbac["Role"]["metadata"]["namespace"]
    assert pod["automountServiceAccountToken"] is True, "its actuator reads the token"
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]) == (1, {"type": "Recreate"})
    (container,) = pod["containers"]
    security = container["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] is True and security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is security["privileged"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}


def _ray_pods() -> list[dict[str, Any]]:
    spec = _by_kind(SIDECAR)["RayCluster"]["spec"]
    return [g["template"]["spec"] for g in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def test_the_sidecar_sees_the_processes_of_its_pod_and_they_find_it(tmp_path: Path) -> None:
    manifests = _by_kind(SIDECAR)
    (tmp_path / "agent.yaml").write_text(manifests["ConfigMap"]["data"]["agent.yaml"])
    file = load_agent_file(tmp_path / "agent.yaml")
    pods = _ray_pods()
    assert len(pods) == 2
    for pod in pods:
        ray, agent = pod["containers"]
        assert pod["shareProcessNamespace"] is True and "hostPID" not in pod
        assert ray["name"] == "ray", "KubeRay takes the first container for Ray's"
        volumes = {v["name"]: v for v in pod["volumes"]}
        shared = {m["mountPath"]: m["name"] for m in agent["volumeMounts"]}
        assert {"name": "ROLECALL_AGENT_DIR", "value": str(file.data_dir)} in ray["env"]
        assert {"name": shared[str(file.data_dir)], "mountPath": str(file.data_dir)} in ray["volumeMounts"]
        assert "emptyDir" in volumes[shared[str(file.data_dir)]] and {*shared.values()} == {*volumes}
        arguments = [a.replace("$(POD_NAME)", "my-raycluster-workers-worker-x7k2p") for a in agent["args"]]
        given = _parser().parse_args(arguments)
        assert (given.node, given.host) == ("my-raycluster-workers-worker-x7k2p", "0.0.0.0")
        assert given.config.name in manifests["ConfigMap"]["data"] and str(given.config.parent) in shared
        (port,) = agent["ports"]
        assert port["containerPort"] == file.port and "hostPort" not in port
        assert agent["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": port["name"]}
        security = agent["securityContext"]
        assert "readinessProbe" not in agent and security["capabilities"] == {"drop": ["ALL"]}
        assert security["runAsNonRoot"] is True and security["readOnlyRootFilesystem"] is True


def test_the_sidecar_has_the_token_of_all_agents(tmp_path: Path) -> None:
    given = yaml.safe_load(_by_kind(SIDECAR)["ConfigMap"]["data"]["agent.yaml"])["token_file"]
    token_file = _config_map(tmp_path).token_file
    assert token_file is not None
    assert {_secret_file(pod, Path(given)) for pod in _ray_pods()} == {_secret_file(_pod(), token_file)}


def test_an_agent_starts_with_the_sidecars_configuration(tmp_path: Path) -> None:
    text = _by_kind(SIDECAR)["ConfigMap"]["data"]["agent.yaml"]
    (tmp_path / "agent.yaml").write_text(text)
    agent = AgentProcess(tmp_path / "node", "--config", str(tmp_path / "agent.yaml"), "--port", "0")
    try:
        assert agent.get("/healthz")[0] == 200
    finally:
        agent.close()


MANIFESTS = (DAEMONSET, WATCH, RBAC, NVSENTINEL, SIDECAR)


@pytest.mark.parametrize("version", SUPPORTED)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.stem)
def test_manifests_are_valid_by_the_published_schemas(path: Path, version: str) -> None:
    for manifest in yaml.safe_load_all(path.read_text()):
        assert problems(manifest, version) == [], manifest["kind"]


FREE = {"data", "labels", "annotations", "matchLabels", "nodeSelector", "limits", "requests", "rayStartParams"}
"""Fields whose keys are the author's."""


def _nested(value: Any) -> Iterator[dict[str, Any]]:
    """`value` and all mappings within, but those in `FREE`."""
    if isinstance(value, dict):
        yield value
        for key, part in value.items():
            if key not in FREE:
                yield from _nested(part)
    elif isinstance(value, list):
        for part in value:
            yield from _nested(part)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.stem)
def test_a_misspelled_field_anywhere_in_a_manifest_is_found(path: Path) -> None:
    places = 0
    for manifest in yaml.safe_load_all(path.read_text()):
        for place in _nested(manifest):
            place["mispelled"] = 1
            assert any("mispelled" in p for p in problems(manifest)), place
            del place["mispelled"]
            places += 1
    assert places > 5


# --- Prometheus ---------------------------------------------------------------------------------------------------


def _promtool_takes(path: Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool here: the Debian package `prometheus` has it")
    done = subprocess.run(
        [program, "check", "config", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_its_file() -> None:
    reported = yaml.safe_load(PROMETHEUS.read_text())
    scrapes = reported["scrape_configs"]
    (rules,) = reported["rule_files"]
    assert all(PurePath(rules).with_name(name).match(rules) for name in rules_yaml())
    paths = {s["job_name"]: s["metrics_path"] for s in scrapes}
    assert paths == {
        AGENT_JOB: "/metrics",
        "rolecall-dcgm": "/metrics/dcgm",
        WATCH_JOB: "/metrics",
        "rolecall-run": "/metrics",
    }
    _promtool_takes(PROMETHEUS)


def test_prometheus_takes_the_clusters_file(tmp_path: Path) -> None:
    """Debian's promtool is built without Kubernetes: the pods are listed here, all else is as it is."""
    value = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus.yaml").read_text())
    assert [s["metrics_path"] for s in value["scrape_configs"]] == ["/metrics", "/metrics/dcgm", "/metrics"]
    for scrape in value["scrape_configs"]:
        assert scrape.pop("kubernetes_sd_configs")[0]["role"] == "pod"
        scrape["static_configs"] = [{"targets": ["10.0.0.17:9477"]}]
    path = tmp_path / "prometheus.yaml"
    path.write_text(yaml.safe_dump(value))
    _promtool_takes(path)
