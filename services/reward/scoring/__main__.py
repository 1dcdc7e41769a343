"""The process of a reward model or a judge: it loads the section and the directory, and answers batches of texts.

The answer to a batch is ``[score, tokens, reason]`` of each text.
"""

from dataclasses import astuple
from pathlib import Path
from typing import Any

from flotilla.shared.children.serving import serve
from flotilla.shared.config.sections.judge import JudgeModelConfig, RewardModelConfig
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.net.absence import absent_or


class Scoring:
    """The model that the opening names.

    Raises:
        InvalidSpec, Unavailable: it cannot be loaded, or not now.
    """

    about = None

    def __init__(self, opening: Any) -> None:
        is_judge = opening["config"]["kind"] == "judge_model"
        config = (JudgeModelConfig if is_judge else RewardModelConfig).model_validate(opening["config"])
        try:
            import torch

            from flotilla.services.reward.scoring.scorer import Judging, Scorer

            torch.set_num_threads(config.threads)
            directory = Path(opening["directory"])
            self._scorer = (
                Judging(config, directory) if isinstance(config, JudgeModelConfig) else Scorer(config, directory)
            )
        except ImportError as error:
            words = f"the reward service has no torch, which a reward model needs (flotilla[torch]): {error}"
            raise InvalidSpec(f"reward model {config.path}: {words}") from error
        except Exception as error:  # whatever loading raises
            words = f"reward model {config.path}: {getattr(error, 'detail', repr(error))}"
            raise absent_or(error, InvalidSpec(words)) from error

    def handle(self, texts: Any) -> object:
        """Score a batch."""
        return [astuple(each) for each in self._scorer.score(texts)]


if __name__ == "__main__":
    serve(Scoring)
