"""How rows were answered lately, as reward services report it: for a curriculum, which takes each outcome once."""

from collections.abc import Mapping

from flotilla.shared.schemas.health import GradingReport, RowOutcome

MOST_SESSIONS = 64


class Outcomes:
    """What each session of a reward service has told of newest outcomes that nobody has taken."""

    def __init__(self) -> None:
        self._by_session: dict[str, dict[int, RowOutcome]] = {}

    def add(self, report: GradingReport) -> None:
        """Keep what a report has."""
        if not report.outcomes:
            return
        if report.session not in self._by_session and len(self._by_session) >= MOST_SESSIONS:
            del self._by_session[next(iter(self._by_session))]
        self._by_session.setdefault(report.session, {}).update((each.number, each) for each in report.outcomes)

    def since(self, seen: Mapping[str, int]) -> list[tuple[str, RowOutcome]]:
        """List those after the ones that were taken, by session and in their order; forgets those before."""
        found = []
        for session, known in self._by_session.items():
            for number in [each for each in known if each <= seen.get(session, 0)]:
                del known[number]
            found += [(session, known[number]) for number in sorted(known)]
        return found
