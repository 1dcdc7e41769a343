"""The reward model's process. It reads JSON lines: first the section and the directory, then batches of texts.

It answers the first with how it starts (``null``, or ``{error, passes}``), and each batch with ``[score, tokens,
reason]`` of each text. It ends with its input, and with its parent.
"""

import json
import os
import signal
import sys
from dataclasses import astuple
from pathlib import Path
from typing import TextIO

from flotilla.shared.children.processes import die_with_parent
from flotilla.shared.config.sections.reward_model import RewardModelConfig
from flotilla.shared.net.absence import may_pass


def serve(lines: TextIO, answers: TextIO) -> None:
    """Load the model that the first line names and answer until the input ends."""

    def say(answer: object) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    first = json.loads(lines.readline())
    config = RewardModelConfig.model_validate(first["config"])
    try:
        import torch

        from flotilla.services.reward.scoring.scorer import Scorer

        torch.set_num_threads(config.threads)
        scorer = Scorer(config, Path(first["directory"]))
    except ImportError as error:
        wrong = f"the reward service has no torch, which a reward model needs (flotilla[torch]): {error}"
        say({"error": wrong, "passes": False})
        return
    except Exception as error:  # whatever loading raises
        say({"error": getattr(error, "detail", repr(error)), "passes": may_pass(error)})
        return
    say(None)
    for line in lines:
        say([astuple(each) for each in scorer.score(json.loads(line))])


if __name__ == "__main__":
    die_with_parent(with_signal=signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent decides when an interrupt ends the model.
    # What libraries print goes to standard error, where the service's log is.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as channel:
        os.dup2(2, 1)
        serve(sys.stdin, channel)
