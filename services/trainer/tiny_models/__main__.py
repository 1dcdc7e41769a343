"""``python -m flotilla.services.trainer.tiny_models RECIPE``: make the models of a trial beside its recipe."""

import sys
from pathlib import Path

from pydantic import ValidationError
from transformers.utils import logging

from flotilla.services.trainer.tiny_models.making import make_models
from flotilla.services.trainer.tiny_models.recipe import Recipe
from flotilla.shared.errors import FlotillaError


def main() -> int:
    """Make the models; a problem is one line."""
    logging.disable_progress_bar()
    path = Path(sys.argv[1])
    try:
        make_models(Recipe.model_validate_json(path.read_bytes()), path.parent)
    except FlotillaError as error:
        sys.stderr.write(f"{error.detail}\n")
        return 1
    except (OSError, ValueError, ValidationError) as error:
        sys.stderr.write(f"{path}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
