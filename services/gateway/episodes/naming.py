"""What an episode's id says: its experiment, and the rollout that holds it. So the gateway keeps no table of them."""

from dataclasses import dataclass

from flotilla.shared.errors import NotFound


@dataclass(frozen=True, slots=True)
class EpisodeName:
    """An id, ``EXPERIMENT.SERVICE.REST``, taken apart; the experiment's may have full stops."""

    text: str
    experiment_id: str
    service_id: str

    @classmethod
    def parse(cls, text: str) -> "EpisodeName":
        """Read an id.

        Raises:
            NotFound: it is not one.
        """
        parts = text.rsplit(".", 2)
        if len(parts) != 3 or not all(parts):
            raise NotFound(f"there is no episode {text[:100]!r}")
        return cls(text, parts[0], parts[1])
