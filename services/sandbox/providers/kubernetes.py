"""Boxes that are pods of a Kubernetes cluster, by the Sandbox resource of agent-sandbox.

The controller of agent-sandbox makes the pod and takes both away at their end. Commands run by the API server's own
``exec``, over a web socket, so that a pod needs no server and may have any image.

Source: ``agents.x-k8s.io/v1beta1`` of kubernetes-sigs/agent-sandbox; ``v4.channel.k8s.io`` and ``v5.channel.k8s.io``.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import urlencode

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.typing import Subprotocol

from flotilla.services.sandbox.providers.base import MARK, MARKED, Box, Cause, Found, ProviderFailed, Wanted
from flotilla.services.sandbox.providers.wire import (
    CAPABILITIES,
    DEADLINE_SECONDS,
    Answered,
    Wire,
    found_boxes,
    object_of,
    reading,
)
from flotilla.shared.net.client.bearer_client import tls_context

URL: Final = "https://kubernetes.default.svc"
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its token, which changes, and the authority of its cluster."""
API: Final = "/apis/agents.x-k8s.io/v1beta1"
POLICIES: Final = "/apis/networking.k8s.io/v1"
CLOSED: Final = "flotilla-sandbox-closed"
"""The name of the network policy of boxes."""
CONTAINER: Final = "box"
START_SECONDS: Final = 600.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0
OPEN_SECONDS: Final = 15.0
CHUNK_BYTES: Final = 1 << 16
STDIN, STDOUT, STATUS = 0, 1, 3
"""Channels: the first byte of each message."""
CHANNELS: Final = (Subprotocol("v5.channel.k8s.io"), Subprotocol("v4.channel.k8s.io"))
NO_IMAGE: Final = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
PAGES: Final = 100


class Kubernetes:
    """A cluster.

    Args:
        url: of its API server.
        key: a token that it takes; None: that of this pod's service account.
        owner: the owner of its boxes.
        namespace: of pods.
        runtime: their RuntimeClass; None: the cluster's own.
        transport: another one than sockets.
    """

    kind: ClassVar[str] = "kubernetes"

    def __init__(
        self,
        url: str,
        key: str | None,
        owner: str,
        *,
        namespace: str = "default",
        runtime: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url, self._key = url.rstrip("/"), key
        self._tls = _tls() if url.startswith("https") else None
        self._wire = Wire("kubernetes", url, self._headers, transport=transport, tls=self._tls)
        self._owner, self._runtime = owner, runtime
        self._namespace = f"/namespaces/{namespace}"
        self._is_closed = False

    def _headers(self) -> Mapping[str, str]:
        key = self._key
        if key is None:
            try:
                key = (ACCOUNT / "token").read_text().strip()
            except OSError as error:
                raise ProviderFailed(Cause.REFUSED, f"no token for kubernetes: {ACCOUNT}: {error.strerror}") from None
        return {"Authorization": f"Bearer {key}"}

    async def create(self, wanted: Wanted) -> Box:
        """Make a Sandbox and wait until it is ready; see ``Provider.create``."""
        ends_at = time.monotonic() + wanted.lifetime_seconds
        if not wanted.has_network:
            await self._close_network()
        path = f"{API}{self._namespace}/sandboxes"
        # 409: an attempt whose answer was lost.
        reply = await self._wire.ask("POST", path, json=self._resource(wanted), allowed=(409,))
        made = {} if reply.status_code == 409 else object_of("kubernetes", reply)
        await self._ready(wanted.name, made)
        return Box(wanted.name, wanted.name, wanted.image, ends_at)

    def _resource(self, wanted: Wanted) -> dict[str, object]:
        labels = wanted.labels(self._owner)
        end = datetime.now(UTC) + timedelta(seconds=wanted.lifetime_seconds)
        sizes = {"memory": str(wanted.memory_bytes), "cpu": f"{int(wanted.processors * 1000)}m"}
        container = {
            "name": CONTAINER,
            "image": wanted.image,
            "command": ["sleep", str(max(1, int(wanted.lifetime_seconds)))],
            "resources": {"limits": sizes, "requests": {"memory": sizes["memory"], "cpu": "100m"}},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"], "add": list(CAPABILITIES)},
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        }
        pod: dict[str, object] = {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "containers": [container],
        }
        if self._runtime is not None:
            pod["runtimeClassName"] = self._runtime
        return {
            "apiVersion": API.removeprefix("/apis/"),
            "kind": "Sandbox",
            "metadata": {"name": wanted.name, "labels": labels},
            "spec": {
                "podTemplate": {"metadata": {"labels": labels}, "spec": pod},
                "shutdownTime": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
                "shutdownPolicy": "Delete",
            },
        }

    async def _close_network(self) -> None:
        """Have a network policy that lets boxes neither call nor be called."""
        if self._is_closed:
            return
        policy = {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": CLOSED},
            "spec": {"podSelector": {"matchLabels": {MARK: MARKED}}, "policyTypes": ["Ingress", "Egress"]},
        }
        await self._wire.ask("POST", f"{POLICIES}{self._namespace}/networkpolicies", json=policy, allowed=(409,))
        self._is_closed = True

    async def _ready(self, name: str, made: Answered) -> None:
        end, pause = time.monotonic() + START_SECONDS, FIRST_PAUSE_SECONDS
        while not _is(made, "Ready"):
            if _is(made, "Finished"):
                raise ProviderFailed(Cause.LOST, "a pod ended before it was ready")
            if time.monotonic() > end:
                raise ProviderFailed(Cause.LATE, f"a sandbox was not ready within {START_SECONDS:g} s")
            await self._check_image(name)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            made = object_of("kubernetes", await self._wire.ask("GET", f"{API}{self._namespace}/sandboxes/{name}"))

    async def _check_image(self, name: str) -> None:
        """Look whether the pod waits for an image that cannot be had: it would wait for ever.

        Raises:
            ProviderFailed: it does.
        """
        reply = await self._wire.ask("GET", f"/api/v1{self._namespace}/pods/{name}", allowed=(404,))
        if reply.status_code == 404:
            return
        with reading("kubernetes"):
            for each in (object_of("kubernetes", reply).get("status") or {}).get("containerStatuses") or ():
                waiting = (each.get("state") or {}).get("waiting") or {}
                if waiting.get("reason") in NO_IMAGE:
                    said = f"{waiting['reason']}: {str(waiting.get('message', ''))[:300]}"
                    cause = f"kubernetes cannot have the image {each.get('image')!r}: {said}"
                    raise ProviderFailed(Cause.REFUSED, cause)

    async def execute(self, box: Box, script: str, seconds: float) -> int:
        """Run a script in the pod; see ``Provider.execute``."""
        code, _ = await self._exec(box, script, seconds=seconds)
        return code

    async def write(self, box: Box, path: str, content: bytes) -> None:
        """Write a file; see ``Provider.write``."""
        code, _ = await self._exec(box, f"head -c {len(content)} >{path}", content, seconds=DEADLINE_SECONDS)
        if code != 0:
            raise ProviderFailed(Cause.FAILED, f"a file could not be written in a pod: exit code {code}")

    async def read(self, box: Box, path: str, max_bytes: int) -> bytes | None:
        """Read a file; see ``Provider.read``."""
        script = f"[ -f {path} ] && head -c {max_bytes + 1} {path}"
        code, content = await self._exec(box, script, seconds=DEADLINE_SECONDS, max_bytes=max_bytes + 1)
        if code not in {0, 1}:
            raise ProviderFailed(Cause.LOST, f"a file could not be read in a pod: exit code {code}")
        return content if code == 0 and len(content) <= max_bytes else None

    async def _exec(
        self, box: Box, script: str, stdin: bytes = b"", *, seconds: float, max_bytes: int = 0
    ) -> tuple[int, bytes]:
        """Run a script; returns its exit code and the first bytes of its output.

        Raises:
            ProviderFailed: nothing is known of what it did.
        """
        words = [("container", CONTAINER), *(("command", word) for word in ("sh", "-c", script))]
        words += [(name, "true") for name in ("stdin", "stdout", "stderr")]
        base = self._url.replace("http", "ws", 1)
        url = f"{base}/api/v1{self._namespace}/pods/{box.id}/exec?{urlencode(words)}"
        try:
            async with (
                asyncio.timeout(seconds),
                connect(
                    url,
                    additional_headers=self._headers(),
                    subprotocols=CHANNELS,
                    ssl=self._tls,
                    compression=None,
                    open_timeout=OPEN_SECONDS,
                    close_timeout=1.0,
                    max_size=1 << 22,
                    proxy=None,
                ) as connection,
            ):
                for start in range(0, len(stdin), CHUNK_BYTES):
                    await connection.send(bytes([STDIN]) + stdin[start : start + CHUNK_BYTES])
                output = bytearray()
                async for message in connection:
                    said = message.encode() if isinstance(message, str) else message
                    if said[:1] == bytes([STATUS]):
                        return _exit_code(said[1:]), bytes(output)
                    if said[:1] == bytes([STDOUT]) and len(output) < max_bytes:
                        output += said[1:]
        except InvalidStatus as error:
            raise _refusal(error.response.status_code) from error
        except TimeoutError as error:
            raise ProviderFailed(Cause.LATE, f"kubernetes did not answer within {seconds:g} s") from error
        except ConnectionClosed:
            pass  # as where the stream ends without a status
        except OSError as error:
            raise ProviderFailed(Cause.ABSENT, f"kubernetes cannot be reached: {error!r}") from error
        except WebSocketException as error:
            raise ProviderFailed(Cause.FAILED, f"kubernetes did not answer: {type(error).__name__}") from error
        raise ProviderFailed(Cause.LOST, "a command's connection to its pod ended before the command did")

    async def destroy(self, box_id: str) -> None:
        """Delete the Sandbox, and with it the pod; see ``Provider.destroy``."""
        await self._wire.ask("DELETE", f"{API}{self._namespace}/sandboxes/{box_id}", allowed=(404,))

    async def list(self) -> Sequence[Found]:
        """List the Sandboxes; see ``Provider.list``."""
        found: list[Found] = []
        params = {"labelSelector": f"{MARK}={MARKED}", "limit": "500"}
        for _ in range(PAGES):
            reply = await self._wire.ask("GET", f"{API}{self._namespace}/sandboxes", params=params)
            listed = object_of("kubernetes", reply)
            with reading("kubernetes"):
                abouts = [each["metadata"] for each in listed.get("items") or ()]
                there = [about for about in abouts if not about.get("deletionTimestamp")]
                more = (listed.get("metadata") or {}).get("continue")
            found += found_boxes("kubernetes", there, "name", "labels")
            if not more:
                break
            params["continue"] = str(more)
        return found

    async def close(self) -> None:
        """Close the connections."""
        await self._wire.close()


def _tls() -> ssl.SSLContext:
    """Believe the authority of the cluster that this runs in, beside those that are believed anyway."""
    authority = ACCOUNT / "ca.crt"
    if not authority.exists():
        return tls_context()
    context = httpx.create_ssl_context(trust_env=False)
    context.load_verify_locations(authority)
    return context


def _is(made: Answered, condition: str) -> bool:
    with reading("kubernetes"):
        conditions = (made.get("status") or {}).get("conditions") or ()
        return any(each.get("type") == condition and each.get("status") == "True" for each in conditions)


def _exit_code(status: bytes) -> int:
    """Read how a command ended.

    Raises:
        ProviderFailed: it did not run, or that is unknown.
    """
    try:
        said = json.loads(status)
        if said.get("status") == "Success":
            return 0
        causes = (said.get("details") or {}).get("causes") or ()
        for cause in causes:
            if cause.get("reason") == "ExitCode":
                return int(cause["message"])
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ProviderFailed(Cause.FAILED, f"kubernetes' status cannot be read: {error!r}") from error
    raise ProviderFailed(Cause.FAILED, f"kubernetes could not run a command: {str(said.get('message'))[:300]}")


def _refusal(status: int) -> ProviderFailed:
    cause = Cause.LOST if status == 404 else Cause.REFUSED if 400 <= status < 500 else Cause.FAILED
    return ProviderFailed(cause, f"kubernetes answered {status} to a command")
