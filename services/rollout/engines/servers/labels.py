"""How policy versions are named at a server.

A server that was restarted by its owner has its first weights, and one that somebody else uses has his: none of these
may be taken for a version of ours. So each engine's labels have a mark of their own, which nobody else has.
"""

import secrets

MARK_BYTES = 4


class VersionLost(Exception):
    """The server's weights are not those that this engine gave it.

    Attributes:
        label: that they have.
    """

    def __init__(self, label: object) -> None:
        super().__init__(f"its weights are labelled {label!r}")
        self.label = label


class VersionLabels:
    """The labels of one engine."""

    def __init__(self) -> None:
        self._mark = f"-{secrets.token_hex(MARK_BYTES)}"

    def of(self, version: int) -> str:
        """Make the label of a version."""
        return f"{version}{self._mark}"

    def version(self, label: object) -> int:
        """Read a label.

        Raises:
            VersionLost: it is none of ours.
        """
        number = label.removesuffix(self._mark) if isinstance(label, str) else ""
        if not (number.isascii() and number.isdecimal()) or label != self.of(int(number)):
            raise VersionLost(label)
        return int(number)


def label_in(reply: object) -> object:
    """Read the label in a server's answer; None if there is none."""
    return reply.get("weight_version") if isinstance(reply, dict) else None
