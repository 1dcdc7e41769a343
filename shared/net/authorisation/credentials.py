"""What a service shows to others, and whom it lets in. The gateway says both when the service registers."""

from collections.abc import Callable

from flotilla.shared.net.authorisation.tokens import bearer_of, digest_of
from flotilla.shared.schemas.service import Registered, ServiceKind

Accepts = Callable[[str | None], bool]
"""Tells whether an ``Authorization`` header is let in."""


class Credentials:
    """The tokens of one service process.

    Args:
        token: what it was given at its start: it registers with it, and lets in who has it.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._peers: dict[ServiceKind, str] = {}
        self._accepted = frozenset({digest_of(token)})
        self._accepted_for_weights: frozenset[str] = frozenset()

    def take(self, registered: Registered) -> None:
        """Remember what the gateway says."""
        self._peers = dict(registered.peers)
        self._accepted = frozenset({digest_of(self._token), *registered.accepts})
        self._accepted_for_weights = frozenset(registered.accepts_for_weights)

    def for_peer(self, kind: ServiceKind) -> str:
        """Return the token to show to services of a kind; its own where the gateway named none."""
        return self._peers.get(kind, self._token)

    def accepts(self, authorization: str | None) -> bool:
        """Return whether an ``Authorization`` header is accepted."""
        return _is_in(self._accepted, authorization)

    def accepts_for_weights(self, authorization: str | None) -> bool:
        """Return whether an ``Authorization`` header allows to read weights."""
        return _is_in(self._accepted | self._accepted_for_weights, authorization)


def _is_in(digests: frozenset[str], authorization: str | None) -> bool:
    token = bearer_of(authorization)
    # A set of digests: how long the look takes tells nothing of a token that hashes to one of them.
    return token is not None and digest_of(token) in digests
