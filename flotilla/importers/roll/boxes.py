"""ROLL's grader of boxes in images: a file beside the spec that asks ROLL's own verifier."""

import re
from typing import Any, Final

FILE: Final = "roll_boxes.py"
WORKER: Final = "DetectionRewardWorker"
THRESHOLD: Final = "DET_IOU_THRESHOLD"
"""Variable by which ROLL chooses how far boxes must agree; by itself it averages over several."""
IN_PIXELS = re.compile(r"qwen-?2", re.IGNORECASE)
"""Models whose boxes ROLL divides by the image's size as the model sees it."""
NOT_TOLD: Final = (
    "boxes of this model are measured in pixels of the image as the model sees it, which a grader is not told: use a "
    "Qwen3-VL model, or a grader of your own by --set"
)

TEXT: Final = '''"""Grades boxes as ROLL's DetectionRewardWorker does. Written by `flotilla import roll`.

Needs ROLL where rewards run (on PYTHONPATH).
"""

import json

from roll.pipeline.rlvr.rewards.detection_reward_worker import DetectionVerifier


def score(sample):
    column = sample.metadata["reward_model"]
    column = json.loads(column) if isinstance(column, str) else column
    given = {**column["verifier_parm"], "is_training": True, "step": 0, "total_steps": 1, "image_grid_thw": None}
    verifier = DetectionVerifier(**given)
    verifier.det_verifier_normalized = False
    form = float(verifier.verify_format(sample.response))
    found = verifier.verify_accuracy(sample.response, column["ground_truth"])
    of_form, of_boxes = column.get("format_ratio", 0.1), column.get("accuracy_ratio", 1.0)
    reward = (found["final_score"] * of_boxes + form * of_form) / (of_boxes + of_form)
    return {"reward": float(reward), "metrics": {"format": form, "boxes": float(found["final_score"])}}
'''


def component() -> dict[str, Any]:
    """Make the component that the file grades."""
    return {"kind": "custom", "path": f"{FILE}:score"}
