"""An answer that must be written between tags, in their order. Tags are found as text: linear in the response."""

from collections.abc import Sequence

from flotilla.services.reward.verifiers.base import verdict
from flotilla.shared.config.sections.reward import FormatConfig
from flotilla.shared.schemas.grading import Grade, GradingSample


class FormatVerifier:
    """Asks for each tag once, with something in it; needs no label."""

    def __init__(self, config: FormatConfig) -> None:
        self._config = config

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample: right if it has the form."""
        return [self._grade(sample) for sample in samples]

    async def aclose(self) -> None:
        """Nothing is held."""

    def _grade(self, sample: GradingSample) -> Grade:
        first = f"<{self._config.tags[0]}>"
        # Chat templates of models that think may open the first tag in the prompt already.
        is_opened = sample.prompt.rstrip().endswith(first) and not sample.response.lstrip().startswith(first)
        text = first + sample.response if is_opened else sample.response
        is_correct = has_form(text, self._config.tags, allows_outside=self._config.allow_text_outside)
        return verdict(self._config, is_correct=is_correct, answer=None)


def has_form(text: str, tags: Sequence[str], *, allows_outside: bool) -> bool:
    """Tell whether ``text`` is ``<a>...</a><b>...</b>`` for the tags a, b: each once, none empty, in this order.

    Args:
        text: what was written.
        tags: names of the tags.
        allows_outside: whether there may be more than white space before, between and after them.
    """
    rest = text
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return False
        before, found, rest = rest.partition(opening)
        inside, closed, rest = rest.partition(closing)
        if not (found and closed and inside.strip()) or (before.strip() and not allows_outside):
            return False
    return allows_outside or not rest.strip()
