"""How grading of a sample ended. Imports no library: commands that read samples start with it."""

from enum import StrEnum


class GradeStatus(StrEnum):
    """How grading of a sample ended. Only ``scored`` has a reward."""

    PENDING = "pending"
    SCORED = "scored"
    ABSTAINED = "abstained"
    ERROR = "error"
