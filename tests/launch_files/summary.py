"""What a folder of launch files comes to: counts, and refusals ranked by the files that each alone keeps out."""

from collections import Counter
from collections.abc import Sequence

from tests.launch_files.outcome import Outcome
from tests.launch_files.reading import Reading
from tests.launch_files.tried import Tried

MOST = 60


def summary(tried: Sequence[Tried]) -> str:
    """Write the counts by system, every file that is not read exactly, and the ranked refusals."""
    lines: list[str] = []
    for system in dict.fromkeys(each.system for each in tried):
        own = [each for each in tried if each.system == system]
        readings, outcomes = Counter(each.reading for each in own), Counter(each.outcome for each in own)
        read = ", ".join(f"{readings[each]} {each}" for each in Reading)
        ended = ", ".join(f"{outcomes[each]} {each}" for each in Outcome)
        wrong = sum(each.is_wrong for each in own)
        share = outcomes[Outcome.TRANSLATED] / len(own)
        lines.append(f"{system}: {len(own)} files; read: {read}; {ended} ({share:.1%}); {wrong} wrong")
    odd = [each for each in tried if each.reading is not Reading.EXACT]
    lines += ["", *(f"{each.reading} {each.id}: {'; '.join(each.differs)[:300]}" for each in odd)]
    for title, chosen in (("wrong", True), ("failed", False)):
        faults = [each for each in tried if each.outcome is Outcome.FAILED and each.is_wrong is chosen]
        lines += [f"{title} {each.id}: {'; '.join(each.problems)[:300]}" for each in faults]
    return "\n".join([*lines, "", "refused by (files that it alone keeps out, files in all)", *_ranked(tried)]) + "\n"


def _ranked(tried: Sequence[Tried]) -> list[str]:
    kept = [each for each in tried if each.outcome is Outcome.REFUSED]
    alone = Counter(each.causes[0] for each in kept if len(each.causes) == 1)
    everywhere = Counter(cause for each in kept for cause in each.causes)
    order = sorted(everywhere, key=lambda cause: (-alone[cause], -everywhere[cause], cause))
    return [f"{alone[cause]:5} {everywhere[cause]:5}  {cause}" for cause in order[:MOST]]
