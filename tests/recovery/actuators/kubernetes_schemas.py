"""The published schemas of Kubernetes, from the package kubernetes-validate: generated from its OpenAPI document, and
strict, so that a field that no schema knows is a problem, as for `kubectl apply --validate=strict`.

No package has KubeRay's CRD. Of a RayCluster the pod templates are validated by Kubernetes' schema, and the fields around
them by `_RAY_CLUSTER`, which repeats the names, types and required fields of KubeRay's Go types that our files and calls
use; any other field is a problem. `_MAINTENANCE_REQUEST` repeats those of NVSentinel's documentation and webhook.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

FOLDER = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
NEWEST = "1.37"
SUPPORTED = ("1.29", "1.33", NEWEST)
"""What the manifests are validated against; the calls are by NEWEST alone."""
RAY = "ray.io/v1"
NVSENTINEL = "nvsentinel.dgxc.nvidia.com/v1"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_ROLE_NAME = re.compile(r"[A-Za-z0-9:._-]{1,253}")  # of RBAC: a path segment
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")

_COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_NAMES = {"type": "array", "items": {"type": "string"}}
_TEMPLATE = {"$ref": "/api/_definitions.json#/$defs/io.k8s.api.core.v1.PodTemplateSpec"}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


_RAY_CLUSTER = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": RAY},
    kind={"const": "RayCluster"},
    metadata={"$ref": "/api/_definitions.json#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"},
    spec=_object(
        ("headGroupSpec",),
        rayVersion={"type": "string"},
        enableInTreeAutoscaling={"type": "boolean"},
        suspend={"type": "boolean"},
        headGroupSpec=_object(("template",), rayStartParams=_TEXTS, serviceType={"type": "string"}, template=_TEMPLATE),
        workerGroupSpecs={
            "type": "array",
            "items": _object(
                ("groupName", "maxReplicas", "minReplicas", "template"),
                groupName={"type": "string"},
                replicas=_COUNT,
                minReplicas=_COUNT,
                maxReplicas=_COUNT,
                numOfHosts=_COUNT,
                suspend={"type": "boolean"},
                rayStartParams=_TEXTS,
                template=_TEMPLATE,
                scaleStrategy=_object(workersToDelete=_NAMES, multihostReplicasToDelete=_NAMES),
            ),
        },
    ),
    status={"type": "object"},
) | {"$id": "https://kubernetes.io/api/raycluster/ray/v1"}


_TEXT, _FLAG = {"type": "string"}, {"type": "boolean"}
_ACTIONS = ("NONE", "COMPONENT_RESET", "CONTACT_SUPPORT", "RESTART_VM", "RESTART_BM", "REPLACE_VM", "CUSTOM", "UNKNOWN")
_MAINTENANCE_REQUEST = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": NVSENTINEL},
    kind={"const": "MaintenanceRequest"},
    metadata={"$ref": "/api/_definitions.json#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"},
    spec=_object(
        ("healthEvent",),
        startTime={"type": "string", "format": "date-time"},
        healthEvent=_object(
            ("version", "nodeName", "isHealthy"),
            version={"const": 1},
            agent=_TEXT,
            componentClass=_TEXT,
            checkName=_TEXT,
            nodeName={"type": "string", "minLength": 1},
            isHealthy={"const": False},
            isFatal=_FLAG,
            recommendedAction={"enum": [*_ACTIONS]},
            customRecommendedAction=_TEXT,
            message=_TEXT,
            errorCode=_NAMES,
            metadata=_TEXTS,
        ),
    ),
    status={"type": "object"},
) | {"$id": "https://kubernetes.io/api/maintenancerequest/nvsentinel/v1"}
_OWN = {RAY: _RAY_CLUSTER, NVSENTINEL: _MAINTENANCE_REQUEST}


def problems(value: Any, version: str = NEWEST) -> list[str]:
    """Of an object with `apiVersion` and `kind`: each `path: what is wrong`."""
    if not isinstance(value, dict) or not isinstance(value.get("apiVersion"), str) or not value.get("kind"):
        return ["$: no object with apiVersion and kind"]
    group = "meta-v1" if value["kind"] == "Status" else re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", value["apiVersion"])
    try:
        file = f"{value['kind'].lower()}-{group}.json"
        validator = _validator(version, value["apiVersion"] if value["apiVersion"] in _OWN else file)
    except FileNotFoundError:
        return [f"$: Kubernetes {version} has no {value['kind']} of {value['apiVersion']}"]
    found = [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(value)]
    return found + _problems_of_names(value)


def selector_problem(selector: str) -> str:
    """Why an API server refuses a label selector (`a=b`, `a in (b,c)`, `a`, joined by commas); empty: it does not."""
    for term in re.split(r",(?![^(]*\))", selector):
        match = re.fullmatch(
            r"\s*(!?)([^\s=!,()]+)\s*(?:(?:==|!=|=)\s*([^\s=,()]*)|\s+(?:not)?in\s+\(([^()]*)\))?\s*", term
        )
        if match is None:
            return f"unable to parse requirement: {term!r}"
        _, key, one, several = match.groups()
        values = [one or ""] if several is None else [v.strip() for v in several.split(",")]
        if not _KEY.fullmatch(key) or not all(_LABEL_VALUE.fullmatch(v) for v in values):
            return f"unable to parse requirement: values: Invalid value: {term!r}"
    return ""


def _problems_of_names(value: dict[str, Any]) -> list[str]:
    """What the server checks beside the schema: names, labels and keys of annotations."""
    metadata, found = value.get("metadata") or {}, []
    name = metadata.get("name", "")
    pattern = _ROLE_NAME if value["apiVersion"].startswith("rbac.") else _NAME
    nameless = value["kind"] == "Status" or value["kind"].endswith("List")
    if not nameless and not (isinstance(name, str) and pattern.fullmatch(name)):
        found.append(f"$.metadata.name: {name!r} is no name")
    found += [
        f"$.metadata.annotations: {k!r} is no key" for k in metadata.get("annotations") or () if not _KEY.fullmatch(k)
    ]
    for key, text in (metadata.get("labels") or {}).items():
        if not _KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(text):
            found.append(f"$.metadata.labels: {key!r}: {text!r} is no label")
    return found


@functools.cache
def _validator(version: str, file: str) -> Draft202012Validator:
    folder = FOLDER / f"v{version}.0-local-strict"
    schema = _OWN[file] if file in _OWN else json.loads((folder / file).read_text())
    return Draft202012Validator(
        schema, registry=_definitions(version), format_checker=Draft202012Validator.FORMAT_CHECKER
    )


@functools.cache
def _definitions(version: str) -> Registry[Any]:
    folder = FOLDER / f"v{version}.0-local-strict"
    return Resource.from_contents(json.loads((folder / "_definitions.json").read_text())) @ Registry()
