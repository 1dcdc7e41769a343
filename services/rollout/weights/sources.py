"""Where a rollout service finds versions that it has missed, and the receiver that keeps an engine at the newest."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flotilla.services.rollout.engines.base import Engine, OnEngineDeath
from flotilla.services.rollout.weights.missed import Locator, MissedVersions, Puller, RelayedPuller
from flotilla.services.rollout.weights.receiver import WeightReceiver
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.shared.config.sections.asynchrony import AsynchronyConfig
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.weights.group.endpoint_client import EndpointClient
from flotilla.shared.weights.mapped.locate import ImageLocator
from flotilla.shared.weights.pull.client import WeightPuller
from flotilla.shared.weights.pull.kept_images import DIRECTORY as KEPT_IMAGES
from flotilla.shared.weights.pull.server import PublishedImages


@dataclass(frozen=True, slots=True)
class WeightSources:
    """Where versions that were missed are found.

    Attributes:
        pull: fetches them.
        locate: finds them in this host's shared memory.
        published: where other rollouts get the images that this one keeps.
        relayed: fetches what members of a publication pass on.
    """

    pull: Puller
    locate: Locator | None = None
    published: PublishedImages | None = None
    relayed: RelayedPuller | None = None

    @classmethod
    def of_fleet(cls, credentials: Credentials, published: PublishedImages) -> "WeightSources":
        """Find them at the fleet's trainers and rollouts, here and elsewhere."""
        puller = WeightPuller(credentials)
        return cls(puller, ImageLocator(credentials), published, puller.relayed)

    def receiver(
        self,
        engine: Engine,
        endpoint: EndpointClient,
        asynchrony: AsynchronyConfig,
        directory: Path,
        notify: Callable[[], None],
        on_engine_death: OnEngineDeath,
    ) -> WeightReceiver:
        """Make what keeps an engine at the version that the gateway wants.

        Args:
            engine: what serves.
            endpoint: joins weight groups.
            asynchrony: how versions travel, and what they do to samples in flight.
            directory: of the experiment.
            notify: called when there is something new to report.
            on_engine_death: called when the engine's process ended while it was to load a version.
        """
        publication = asynchrony.publication
        missed = MissedVersions(
            self.pull,
            self.locate if publication.may_map else None,
            directory / KEPT_IMAGES if publication.write_to_directory else None,
            self.relayed,
        )
        return WeightReceiver(
            engine,
            VersionGate(),
            endpoint,
            missed,
            asynchrony.on_weight_update,
            notify,
            on_engine_death,
            published=self.published,
        )
