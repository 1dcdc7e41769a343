"""Run by the interpreter of a server's own environment: reads arguments as the server would, and starts nothing.

``python arguments_reader.py KIND ARGUMENT ...`` ends as the server's own parser ends: by exit code 2 and a message
where it refuses them.
"""

import argparse
import sys
from importlib import import_module
from typing import Any


def sglang_parser() -> Any:
    """Make the parser of ``sglang.launch_server``."""
    parser = argparse.ArgumentParser(prog="sglang")
    import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    return parser


def vllm_parser() -> Any:
    """Make the parser of vLLM's server."""
    parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser(prog="vllm")
    return import_module("vllm.entrypoints.launchers.cli_args").make_arg_parser(parser)


PARSERS = {"sglang": sglang_parser, "vllm": vllm_parser}
REQUIRED = {"sglang": ["--model-path", "model"], "vllm": []}
"""What a parser does not do without."""

if __name__ == "__main__":
    # The folder of this file is no package of the server's.
    sys.path.pop(0)
    kind, *words = sys.argv[1:]
    PARSERS[kind]().parse_args([*REQUIRED[kind], *words])
