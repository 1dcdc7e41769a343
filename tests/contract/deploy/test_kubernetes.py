"""The manifests for Kubernetes: taken without a warning, of variables, commands, routes and metrics that there are."""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import yaml
from fastapi import FastAPI

from flotilla.services.gateway.prometheus import metrics_of
from flotilla.services.trainer.supervisor.supervisor import STOP_SECONDS as WORKER_STOP_SECONDS
from flotilla.shared.environment.settings import NOTICE_SECONDS, ports_from
from flotilla.shared.net.server.serving import add_health_routes
from flotilla.shared.service.app import STOP_SECONDS
from flotilla.shared.telemetry.prometheus import page_of
from tests.contract.deploy.manifests import (
    KUBERNETES,
    OVERLAYS,
    ROOT,
    build,
    containers,
    kustomize,
    of_kind,
    pod_specs,
    problems,
)
from tests.contract.deploy.variables import unread_variables
from tests.prometheus import parse_page
from tests.unit.gateway.test_prometheus import a_running_gateway

pytestmark = pytest.mark.skipif(kustomize() is None, reason="neither kustomize nor kubectl is here")
VARIANTS: list[tuple[str, ...]] = [
    *((overlay,) for overlay in OVERLAYS),
    *((overlay, "monitoring", "keda", "leader-worker-set") for overlay in OVERLAYS),
    ("gpu", "monitoring", "hpa", "job-set"),
]
SERVICES = {"gateway", "reward", "sandbox", "rollout", "trainer"}
SERVER_FILES = {"redis-users.acl", "redis-health"}
REDIS_FILES = {*SERVER_FILES, *(f"redis-url-{kind}" for kind in ("gateway", "reward", "rollout", "trainer"))}
SECRET_FILES = {"token", "service-token", *REDIS_FILES}


def every_container(overlay: str) -> dict[str, dict[str, Any]]:
    return containers(build(overlay))


def variables_of(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container["env"]}


def shared_variables(overlay: str) -> dict[str, str]:
    [found] = [each for each in of_kind(build(overlay), "ConfigMap") if each["metadata"]["name"].startswith("env")]
    return dict(found["data"])


@pytest.mark.parametrize("variant", VARIANTS, ids="+".join)
def test_kubernetes_takes_every_manifest_and_knows_every_key_of_it(variant: tuple[str, ...]) -> None:
    found = {
        f"{manifest['kind']} {manifest['metadata']['name']}": wrong
        for manifest in build(*variant)
        if (wrong := problems(manifest))
    }

    assert found == {}


def test_the_check_refuses_a_key_that_is_misspelt_in_each_kind() -> None:
    for manifest in build("sglang", "monitoring", "keda", "leader-worker-set"):
        if manifest["kind"] not in {"ConfigMap"}:
            assert problems({**manifest, "spec": {**manifest.get("spec", {}), "replica": 1}}), manifest["kind"]
    for manifest in of_kind(build("gpu", "job-set"), "JobSet"):
        [spec] = pod_specs(manifest)
        spec["containers"][0]["imagee"] = spec["containers"][0].pop("image")
        try:
            assert problems(manifest)
        finally:
            spec["containers"][0]["image"] = spec["containers"][0].pop("imagee")


@pytest.mark.parametrize("variant", VARIANTS, ids="+".join)
def test_every_resource_is_in_our_namespace_and_no_two_have_one_name(variant: tuple[str, ...]) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in build(*variant)]

    assert len(names) == len(set(names))
    for manifest in build(*variant):
        if manifest["kind"] != "Namespace":
            assert manifest["metadata"]["namespace"] == "flotilla"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_service_runs_a_module_that_exists(overlay: str) -> None:
    found = every_container(overlay)

    assert set(found) == SERVICES
    for name, container in found.items():
        assert container["args"] == ["python", "-P", "-m", f"flotilla.services.{name}"]
        assert "command" not in container, "the image's entry point names the address"
        assert (ROOT / "services" / name / "__main__.py").is_file()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_variable_is_one_that_the_code_reads(overlay: str) -> None:
    given = {*shared_variables(overlay), *(n for each in every_container(overlay).values() for n in variables_of(each))}

    assert unread_variables(given) == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_secrets_are_files_that_the_script_writes_and_no_variables(overlay: str) -> None:
    for manifest in build(overlay):
        for spec in pod_specs(manifest):
            text = yaml.safe_dump(spec)
            assert "secretKeyRef" not in text and "secretRef" not in text
            for volume in spec["volumes"]:
                if secret := volume.get("secret"):
                    assert {item["key"] for item in secret["items"]} <= SECRET_FILES
    for container in every_container(overlay).values():
        for name, value in variables_of(container).items():
            if name.endswith("_FILE"):
                assert value.removeprefix("/run/secrets/flotilla/") in {"token", "service-token", "redis-url"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_kind_of_service_has_its_own_user_of_redis_and_no_other(overlay: str) -> None:
    found: dict[str, set[str]] = {}
    for manifest in build(overlay):
        for spec in pod_specs(manifest):
            keys = {item["key"] for each in spec["volumes"] for item in each.get("secret", {}).get("items", [])}
            [name] = {each["name"] for each in spec["containers"]}
            found.setdefault(name, set()).update(keys & REDIS_FILES)

    assert found == {
        "redis": SERVER_FILES,
        "sandbox": set(),
        **{kind: {f"redis-url-{kind}"} for kind in ("gateway", "reward", "rollout", "trainer")},
    }


def test_each_file_of_a_secret_that_a_variable_names_is_mounted() -> None:
    for manifest in build("cpu"):
        for spec in pod_specs(manifest):
            [volume] = [each for each in spec["volumes"] if "secret" in each]
            mounted = {f"/run/secrets/flotilla/{item['path']}" for item in volume["secret"]["items"]}
            named = {
                each["value"]
                for container in spec["containers"]
                for each in container.get("env", [])
                if each["name"].endswith("_FILE")
            }
            assert named <= mounted
            if named:
                assert named == mounted, "nobody is given a secret that it does not read"


def test_the_sandbox_knows_neither_the_data_plane_nor_any_data() -> None:
    sandbox = every_container("cpu")["sandbox"]

    assert "FLOTILLA_REDIS_URL_FILE" not in variables_of(sandbox)
    assert {mount["name"] for mount in sandbox["volumeMounts"]} == {"secrets", "tmp"}


def health_paths() -> set[str]:
    app = FastAPI()
    before = set(app.openapi()["paths"])
    app = FastAPI()
    add_health_routes(app, why_not_ready=lambda _: None, gauges=lambda _: {})
    return set(app.openapi()["paths"]) - before


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_and_scrapes_ask_routes_that_there_are(overlay: str) -> None:
    for name, container in every_container(overlay).items():
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[kind]["httpGet"]["path"] in health_paths()
            assert container[kind]["httpGet"]["port"] in ports
        assert ports["http"] == int(shared_variables(overlay)["FLOTILLA_PORT"])
        assert container["livenessProbe"]["httpGet"]["path"] == "/healthz", "what others lack ends nobody"
        assert container["readinessProbe"]["httpGet"]["path"] == ("/healthz" if name == "sandbox" else "/readyz")
    for monitor in of_kind(build(overlay, "monitoring", "keda", "leader-worker-set"), "ServiceMonitor", "PodMonitor"):
        [endpoint] = monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["path"] in health_paths()
        assert endpoint["port"] == "http"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_who_leaves_has_time_for_it_before_the_kill(overlay: str) -> None:
    for manifest in of_kind(build(overlay), "Deployment", "StatefulSet"):
        [spec] = pod_specs(manifest)
        [container] = spec["containers"]
        grace = spec["terminationGracePeriodSeconds"]
        if container["name"] == "rollout":
            notice = float(variables_of(container).get("FLOTILLA_NOTICE_SECONDS", NOTICE_SECONDS))
            assert grace >= notice + STOP_SECONDS
            assert container["lifecycle"]["preStop"]["exec"]["command"][-1].startswith("kill -TERM 1;")
        if container["name"] == "trainer":
            assert grace >= WORKER_STOP_SECONDS + 2 * STOP_SECONDS


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_container_gains_a_privilege_or_writes_into_its_image(overlay: str) -> None:
    for manifest in build(overlay):
        for spec in pod_specs(manifest):
            assert spec["automountServiceAccountToken"] is False
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            for container in [*spec["containers"], *spec.get("initContainers", [])]:
                context = container["securityContext"]
                assert context["readOnlyRootFilesystem"] is True
                assert context["allowPrivilegeEscalation"] is False
                assert context["capabilities"]["drop"] == ["ALL"]
                if container["name"] == "sandbox":
                    assert set(context["capabilities"]["add"]) == {"CHOWN", "DAC_OVERRIDE", "KILL", "SETGID", "SETUID"}
                else:
                    assert spec["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_image_has_a_version(overlay: str) -> None:
    for manifest in build(overlay):
        for spec in pod_specs(manifest):
            for container in spec["containers"]:
                assert re.fullmatch(r".+:\d+\.\d+\.\d+(-\w+)?", container["image"]), container["image"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_trainers_and_rollouts_have_shared_memory_for_weights_and_the_same_data(overlay: str) -> None:
    for manifest in of_kind(build(overlay), "Deployment", "StatefulSet"):
        [spec] = pod_specs(manifest)
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
        if spec["containers"][0]["name"] in {"trainer", "rollout"}:
            assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
            assert volumes[mounts["/data"]]["persistentVolumeClaim"] == {"claimName": "data"}
    [claim] = of_kind(build(overlay), "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_controller_counts_the_pods_of_another(overlay: str) -> None:
    found = of_kind(build(overlay), "Deployment", "StatefulSet")

    for controller in found:
        wanted = controller["spec"]["selector"]["matchLabels"].items()
        chosen = [each for each in found if wanted <= each["spec"]["template"]["metadata"]["labels"].items()]
        assert chosen == [controller]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_selector_selects_something(overlay: str) -> None:
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in of_kind(build(overlay), "Deployment")]
    labels += [each["spec"]["template"]["metadata"]["labels"] for each in of_kind(build(overlay), "StatefulSet")]
    budgets = of_kind(build(overlay), "PodDisruptionBudget")

    for manifest in budgets:
        wanted = manifest["spec"]["selector"]["matchLabels"].items()
        assert len([each for each in labels if wanted <= each.items()]) == 1
    for service in of_kind(build(overlay), "Service"):
        assert any(service["spec"]["selector"].items() <= each.items() for each in labels)
    known = {each["app.kubernetes.io/component"] for each in labels}
    for policy in of_kind(build(overlay), "NetworkPolicy"):
        assert set(components_of(policy)) <= known


def components_of(node: Any) -> Iterator[str]:
    """Find the components that a network policy names."""
    if isinstance(node, dict):
        if node.get("key") == "app.kubernetes.io/component":
            yield from node["values"]
        for key, value in node.items():
            if key == "app.kubernetes.io/component":
                yield value
            elif key != "metadata":
                yield from components_of(value)
    elif isinstance(node, list):
        for each in node:
            yield from components_of(each)


def test_no_sandbox_reaches_the_data_plane_or_the_network() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(build("cpu"), "NetworkPolicy")}
    [rule] = policies["redis"]["ingress"]
    [expression] = rule["from"][0]["podSelector"]["matchExpressions"]

    assert set(expression["values"]) == {"gateway", "trainer", "rollout", "reward"}
    assert "Egress" in policies["sandbox"]["policyTypes"]
    assert {port["port"] for rule in policies["sandbox"]["egress"] for port in rule["ports"]} == {8470, 53}


def test_trainers_and_rollouts_are_reached_at_the_ports_that_they_listen_on_and_at_no_others() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(build("sglang"), "NetworkPolicy")}
    ports = [(rule["from"], port) for rule in policies["compute"]["ingress"] for port in rule["ports"]]
    listeners = ports_from(shared_variables("sglang"))
    computing = [
        spec
        for kind in ("Deployment", "StatefulSet")
        for each in of_kind(build("sglang"), kind)
        if each["metadata"]["name"].partition("-")[0] in {"trainer", "rollout"}
        for spec in pod_specs(each)
    ]
    [kernels] = {
        tuple(map(int, each["value"].split()))
        for spec in computing
        for each in spec["securityContext"]["sysctls"]
        if each["name"] == "net.ipv4.ip_local_port_range"
    }

    assert listeners is not None and len(computing) == 3
    assert all("ports" in rule and rule["ports"] for rule in policies["compute"]["ingress"]), "no rule opens all"
    [(peers, opened)] = [(peers, port) for peers, port in ports if port["port"] != 8470]
    assert (opened["port"], opened["endPort"]) == (listeners.start, kernels[1])
    assert listeners.stop == kernels[0], "one range, without a gap"
    [expression] = peers[0]["podSelector"]["matchExpressions"]
    assert set(expression["values"]) == {"trainer", "rollout"}


def test_a_spot_pool_is_beside_one_that_stays_and_has_a_notice_that_providers_give() -> None:
    pools = {each["metadata"]["name"]: each for each in of_kind(build("sglang"), "Deployment")}
    spot, kept = (next(pod_specs(pools[name])) for name in ("rollout-spot", "rollout"))

    assert spot["nodeSelector"] == {"karpenter.sh/capacity-type": "spot"}
    assert spot["terminationGracePeriodSeconds"] <= 30
    assert "nodeSelector" not in kept
    assert {each["key"] for each in spot["tolerations"]} == {"karpenter.sh/capacity-type", "nvidia.com/gpu"}


@pytest.mark.parametrize("component", ["leader-worker-set", "job-set"])
def test_a_variant_of_the_trainer_has_the_pod_of_the_stateful_set(component: str) -> None:
    kind = {"leader-worker-set": "LeaderWorkerSet", "job-set": "JobSet"}[component]
    [variant] = of_kind(build("gpu", component), kind)
    [stateful] = [each for each in of_kind(build("gpu"), "StatefulSet") if each["metadata"]["name"] == "trainer"]

    [made], [own] = list(pod_specs(variant)), list(pod_specs(stateful))
    made = {key: value for key, value in made.items() if key != "restartPolicy"}
    assert made == own
    assert not [e for e in of_kind(build("gpu", component), "StatefulSet") if e["metadata"]["name"] == "trainer"]
    assert "component': 'trainer'" in str(variant["spec"]), "network policies and the service select its pods by it"


async def test_rollouts_are_scaled_by_metrics_that_the_gateway_serves() -> None:
    series = set(parse_page(page_of(metrics_of(await a_running_gateway()))))
    served = {(name, key, value) for name, labels in series for key, value in labels}
    names = {name for name, _ in series}
    [scaled] = of_kind(build("cpu", "keda"), "ScaledObject")
    [autoscaler] = of_kind(build("cpu", "hpa"), "HorizontalPodAutoscaler")

    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    external = [metric["external"]["metric"] for metric in autoscaler["spec"]["metrics"]]
    for query in queries:
        used = re.findall(r"(flotilla_\w+)(?:\{(\w+)=\"(\w+)\"\})?", query)
        assert used
        for name, label, value in used:
            assert name in names
            assert not label or (name, label, value) in served
    for metric in external:
        assert metric["name"] in names
        for label, value in metric.get("selector", {}).get("matchLabels", {}).items():
            assert (metric["name"], label, value) in served
    rules = yaml.safe_load((KUBERNETES / "components" / "hpa" / "rules.yaml").read_text(encoding="utf-8"))
    assert {rule["seriesQuery"] for rule in rules["rules"]["external"]} == {metric["name"] for metric in external}
    used = [set(re.findall(r"flotilla_\w+", query)) for query in queries]
    assert set().union(*used) >= {metric["name"] for metric in external}, "both scale by the same"
    deployments = {each["metadata"]["name"] for each in of_kind(build("cpu"), "Deployment")}
    assert {each["spec"]["scaleTargetRef"]["name"] for each in (scaled, autoscaler)} <= deployments


def test_an_update_replaces_the_gateway_only_when_it_has_ended() -> None:
    [gateway] = [each for each in of_kind(build("cpu"), "Deployment") if each["metadata"]["name"] == "gateway"]

    assert gateway["spec"]["strategy"] == {"type": "Recreate"}
    assert gateway["spec"]["replicas"] == 1


def test_requests_are_below_limits_in_overlays_that_grow() -> None:
    memory = [
        int(every_container(overlay)["trainer"]["resources"]["limits"]["memory"][:-2]) for overlay in ("cpu", "gpu")
    ]

    assert all(less < more for less, more in pairwise(memory))
