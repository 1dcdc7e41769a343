"""``flotilla export``: one whole model of a checkpoint that holds adapters."""

import argparse
import asyncio
from functools import partial
from pathlib import Path

from flotilla.cli.exit_codes import ExitCode
from flotilla.cli.output import new_console, short_path, telling, write_json
from flotilla.evaluation_spec import model_at
from flotilla.shared.errors import InvalidRequest


async def export(arguments: argparse.Namespace) -> int:
    """Merge a checkpoint's adapters into the weights that they were trained beside, and write the model."""
    source = model_at(Path(arguments.source), "SOURCE", may_be_adapter=True)
    directory = Path(arguments.directory)
    try:
        from flotilla.services.trainer.checkpoint.export import export as write
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"exporting needs {error.name}: pip install 'flotilla[torch]'") from None
    async with telling(f"writing {short_path(directory)}"):
        await asyncio.to_thread(partial(write, source, directory, averaged=arguments.average))
    if arguments.json:
        write_json({"source": str(source), "directory": str(directory)})
    else:
        new_console().print(f"model      {short_path(directory)}", markup=False)
    return ExitCode.DONE
