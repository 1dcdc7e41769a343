"""What kustomize makes of the overlays, and whether Kubernetes would take it."""

import functools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu", "sglang")
SCHEMAS = Path(__file__).parent / "schemas"
VERSION = "1.34"
OTHER_GROUPS = ("jobset.x-k8s.io", "leaderworkerset.x-k8s.io", "keda.sh", "monitoring.coreos.com")
POD_SPEC = "x-flotilla-pod-spec"

Manifest = dict[str, Any]


def kustomize() -> list[str] | None:
    """Find a program that resolves overlays."""
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    return ["kubectl", "kustomize"] if shutil.which("kubectl") else None


@functools.cache
def build(overlay: str, *components: str) -> list[Manifest]:
    """Resolve an overlay, with more components laid over it."""
    command = kustomize()
    assert command is not None
    with tempfile.TemporaryDirectory(prefix="flotilla-kubernetes-") as folder:
        # Kustomize takes folders by relative paths alone, and resolves links first.
        here = os.path.relpath(KUBERNETES.resolve(), Path(folder).resolve())
        resources: Mapping[str, object] = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": "flotilla",
            "resources": [f"{here}/overlays/{overlay}"],
            "components": [f"{here}/components/{name}" for name in components],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(resources), encoding="utf-8")
        result = subprocess.run([*command, folder], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return list(yaml.safe_load_all(result.stdout))


def problems(manifest: Manifest) -> list[str]:
    """List what Kubernetes, or the operator whose resource it is, would refuse; unknown keys are refused."""
    group, _, version = manifest["apiVersion"].partition("/")
    if group not in OTHER_GROUPS:
        return _core_problems(manifest)
    path = SCHEMAS / f"{group}_{version}_{manifest['kind']}.json"
    schema = _strict(json.loads(path.read_text(encoding="utf-8")), top=True)
    found = [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    ]
    for spec in pod_specs(manifest):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        found += _core_problems(pod)
    return found


def _core_problems(manifest: Manifest) -> list[str]:
    try:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}"]
    return []


def _strict(schema: Any, *, top: bool = False) -> Any:
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) for key, value in schema.items() if key != "properties"}
    if "x-kubernetes-int-or-string" in schema:
        made.pop("type", None)
    if properties := schema.get("properties"):
        made["properties"] = {key: _strict(value) for key, value in properties.items()}
        is_open = top or "additionalProperties" in schema or "x-kubernetes-preserve-unknown-fields" in schema
        # `metadata` of a template is not written out in these definitions.
        if not is_open and POD_SPEC not in schema:
            made["additionalProperties"] = False
    return made


def pod_specs(manifest: Manifest) -> Iterator[Manifest]:
    """Find the specifications of pods, wherever they are."""

    def within(node: Any) -> Iterator[Manifest]:
        if isinstance(node, dict):
            if "containers" in node:
                yield node
            else:
                for value in node.values():
                    yield from within(value)
        elif isinstance(node, list):
            for value in node:
                yield from within(value)

    return within(manifest.get("spec", {}))


def of_kind(manifests: Sequence[Manifest], *kinds: str) -> list[Manifest]:
    """Choose those of some kinds."""
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def containers(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Every container of ours by its name; the data plane's is not."""
    return {
        each["name"]: each
        for manifest in manifests
        for spec in pod_specs(manifest)
        for each in spec["containers"]
        if each["name"] != "redis"
    }
