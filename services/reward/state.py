"""What a reward service opens at start-up."""

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from redis.asyncio import Redis

from flotilla.services.reward.audit import Auditor, build_auditor
from flotilla.services.reward.consumer import RewardConsumer, RewardLane
from flotilla.services.reward.service import RewardService
from flotilla.services.reward.teacher.teachers import Teachers, open_teachers
from flotilla.services.reward.verifiers.base import Verifier
from flotilla.services.reward.verifiers.registry import Surroundings, build_verifier
from flotilla.shared.config.sections.distillation import DistillationConfig
from flotilla.shared.config.sections.reward import RemoteConfig, RewardConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.environment.settings import Secrets, ServiceSettings, gateway_urls
from flotilla.shared.errors import Unavailable
from flotilla.shared.locations.allowed import read_places
from flotilla.shared.models.hub import fetched
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.samples.recorder import SampleRecorder
from flotilla.shared.schemas.experiment import Page
from flotilla.shared.schemas.service import SANDBOX, Assignment, Registration, ServiceKind, ServiceView
from flotilla.shared.schemas.task import Lane
from flotilla.shared.service.app import at_work
from flotilla.shared.service.devices import host_capabilities
from flotilla.shared.service.membership import Membership
from flotilla.shared.streams.hop import HopName, StreamsConfig, holder_name
from flotilla.shared.streams.redis.connection import connect, silence
from flotilla.shared.streams.redis.plane import RedisDataPlane

CONCURRENCY = 32
"""Groups graded at the same time: graders wait more than they compute."""
GROUPS_PER_REQUEST = 4
"""Groups graded at the same time for each request that a remote grader may have: some wait for another attempt."""
WAITING_CONCURRENCY = 4096
"""The same where rewards come later than the episodes' ends: groups that wait hold up no others."""


@dataclass(frozen=True, slots=True)
class RewardState:
    """See ``flotilla.shared.service.app.ServiceState``."""

    service: RewardService
    membership: Membership


@dataclass
class RewardSession:
    """See ``flotilla.services.reward.service.Session``."""

    worker: RewardConsumer
    verifier: Verifier
    recorder: SampleRecorder | None = None
    teachers: Teachers | None = None
    auditor: Auditor | None = None

    async def close(self) -> None:
        """End the verifiers' processes and connections; write the samples that wait."""
        await self.verifier.aclose()
        if self.auditor is not None:
            await self.auditor.aclose()
        if self.teachers is not None:
            await self.teachers.aclose()
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close)


@dataclass(frozen=True, slots=True)
class SessionOpener:
    """Makes verifier and worker for an experiment.

    Attributes:
        holder: what this process is named as a claimer.
    """

    redis: Redis
    client: GatewayClient
    settings: ServiceSettings
    credentials: Credentials
    holder: str

    async def __call__(self, spec: ExperimentSpec, assignment: Assignment) -> RewardSession:
        """Build the verifier and open the hops.

        Raises:
            InvalidSpec: a custom function or a reward model cannot be loaded, or a teacher's key is not set.
            ModelError: the hub does not give a reward model.
            Unavailable: code is to be graded, and there is no sandbox now or the gateway does not name it.
        """
        sandbox_url = await self._sandbox_url(assignment.experiment_id) if spec.runs_code else None
        for model in spec.reward.hosted_models:
            await fetched(model)
        streams = StreamsConfig(lease_seconds=self.settings.lease_seconds)
        surroundings = Surroundings(
            experiment=assignment.experiment_id,
            sandbox_url=sandbox_url,
            sandbox_token=self.credentials.for_peer(ServiceKind.SANDBOX),
            grader_networks=self.settings.grader_networks,
            secrets=Secrets(os.environ),
            gateway_url=self.settings.public_url or gateway_urls(self.settings.gateway_url)[0],
            mailbox=RedisDataPlane(self.redis, assignment.experiment_id, Lane.TRAIN, streams).mailbox,
            places=read_places(os.environ, self.settings.data),
        )
        distillation = spec.algorithm.distillation
        verifier = build_verifier(spec.reward, surroundings)
        auditor = build_auditor(spec.reward, surroundings)
        try:
            await verifier.start()
            if auditor is not None:
                await auditor.start()
            teachers = open_teachers(distillation, surroundings)
        except BaseException:
            await verifier.aclose()
            if auditor is not None:
                await auditor.aclose()
            raise
        lanes = []
        for lane in Lane if spec.evaluation is not None else (Lane.TRAIN,):
            plane = RedisDataPlane(self.redis, assignment.experiment_id, lane, streams)
            hop = plane.hop(HopName.GENERATED, self.holder)
            lanes.append(RewardLane(lane.value, hop, is_filtered=lane is Lane.TRAIN))
        recorder = None
        if spec.samples is not None:
            recorder = SampleRecorder(Path(assignment.directory), spec.samples, writer="reward").start()
        at_a_time = groups_at_a_time(spec.reward, distillation)
        consumer = RewardConsumer(lanes, verifier, spec.reward, at_a_time, recorder, teachers, auditor)
        consumer.tally.keeps_outcomes = spec.data.curriculum is not None
        return RewardSession(consumer, verifier, recorder, teachers, auditor)

    async def _sandbox_url(self, experiment_id: str) -> str:
        """Find a sandbox of the experiment, or any while it has none; several rewards spread over several.

        Raises:
            Unavailable: there is none now: it may have been killed a moment ago.
        """
        page = await self.client.call("GET", "/v1/services", params={"kind": "sandbox", "limit": 100})
        views = Page[ServiceView].model_validate(page).items
        usable = [view for view in views if view.experiment_id == experiment_id] or views
        if not usable:
            raise Unavailable(
                "a reward component of kind code needs a sandbox service, and the fleet has none now",
                component=SANDBOX,
            )
        return usable[os.getpid() % len(usable)].address


def groups_at_a_time(reward: RewardConfig, distillation: DistillationConfig | None = None) -> int:
    """Return how many groups to grade concurrently, so that every grader's and teacher's own limit can be reached."""
    if reward.waits_for_answers:
        return WAITING_CONCURRENCY
    requests = [each.concurrency for each in reward.components if isinstance(each, RemoteConfig)]
    requests += [each.concurrency for each in (() if distillation is None else distillation.servers)]
    return max(CONCURRENCY, GROUPS_PER_REQUEST * max(requests, default=0))


@contextlib.asynccontextmanager
async def open_state(settings: ServiceSettings, address: str, credentials: Credentials) -> AsyncIterator[RewardState]:
    """Open the data plane's client, the service and its membership; close them in reverse order."""
    incarnation = secrets.token_hex(8)
    holder = holder_name(ServiceKind.REWARD, os.getpid(), incarnation)
    async with contextlib.AsyncExitStack() as stack:
        redis = connect(settings.redis_url)
        stack.push_async_callback(redis.aclose)
        client = await stack.enter_async_context(GatewayClient(settings.gateway_url, settings.token))
        service = RewardService(SessionOpener(redis, client, settings, credentials, holder))
        offered = await asyncio.to_thread(host_capabilities)
        registration = Registration(
            kind=ServiceKind.REWARD,
            address=address,
            host=socket.gethostname(),
            pid=os.getpid(),
            capabilities=offered.model_copy(update={"live_changes": True}),
            incarnation=incarnation,
        )
        membership = Membership(
            client,
            registration,
            service.observe,
            service.apply,
            credentials=credentials,
            gauges=partial(silence, redis),
            settings=settings,
        )
        await stack.enter_async_context(at_work(service, membership))
        yield RewardState(service, membership)
