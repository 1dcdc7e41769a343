"""Counts the tokens of many prompts in child processes, so that the gateway itself loads no tokenizer.

Called on a thread. Whoever sets ``stop`` ends it within one batch.
"""

import json
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from flotilla.shared.children.processes import python_module
from flotilla.shared.errors import DataError, ModelError, Unavailable
from flotilla.shared.models.prompts import PromptTemplate
from flotilla.shared.schemas.task import Message

log = logging.getLogger(__name__)

BATCH: Final = 256
QUIET_SECONDS: Final = 2.0
"""What takes longer says how far it is, this often."""
END_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 300.0
"""Longest time for a batch of prompts, or for loading the tokenizer; a child that takes longer is killed."""


class LengthProcess:
    """One child process. Its owner asks one question at a time.

    Attributes:
        has_chat_template: whether the tokenizer brings one; known once it is loaded.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.has_chat_template = False

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            DataError: the process ended.
            Unavailable: it was killed, such as since it did not answer within ``ANSWER_SECONDS``.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        deadline = threading.Timer(ANSWER_SECONDS, self._process.kill)
        deadline.daemon = True
        deadline.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        finally:
            deadline.cancel()
        if not line:
            code = self._process.wait(END_SECONDS)
            # Killed for memory, or by the deadline of a busy machine: that passes.
            kind = Unavailable if code == -signal.SIGKILL else DataError
            raise kind(f"a process that counts prompts' tokens ended with exit code {code}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def running_process(model_path: str, template: PromptTemplate) -> Iterator[LengthProcess]:
    """Start a child process and load the tokenizer in it; ends it afterwards.

    What it knows of the tokenizer is in ``has_chat_template``.

    Raises:
        ModelError: the tokenizer cannot be loaded.
    """
    environment = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
    }
    command = python_module("flotilla.services.gateway.datasets.length_worker")
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment
    ) as process:
        try:
            child = LengthProcess(process)
            asked = {"model": model_path, "input_template": template.input_template, "options": dict(template.options)}
            answer = child.ask(asked)
            if "error" in answer:
                raise (Unavailable if answer.get("passes") else ModelError)(answer["error"], path=model_path)
            child.has_chat_template = answer["has_chat_template"]
            yield child
        finally:
            process.kill()


def prompt_lengths(
    prompts: Sequence[Sequence[Message]],
    model_path: str,
    template: PromptTemplate,
    *,
    workers: int,
    stop: threading.Event | None = None,
) -> list[int]:
    """Count the tokens of each prompt.

    Args:
        prompts: messages of each.
        model_path: directory with the tokenizer.
        template: what is put around them.
        workers: child processes.
        stop: ends the count early.

    Raises:
        ModelError: the tokenizer cannot be loaded.
        DataError: the chat template refuses a prompt, a process died, or ``stop`` was set.
        Unavailable: a process was killed, or something else is in the way that passes.
    """
    starts = range(0, len(prompts), BATCH)
    workers = max(min(workers, len(starts)), 1)
    idle: queue.SimpleQueue[LengthProcess] = queue.SimpleQueue()
    begun = reported_at = time.monotonic()

    def measure(start: int) -> list[int]:
        if stop is not None and stop.is_set():
            raise DataError("counting prompts' tokens was stopped")
        child = idle.get()
        try:
            batch = [[[m.role, m.content] for m in prompt] for prompt in prompts[start : start + BATCH]]
            answer = child.ask({"prompts": batch})
        finally:
            idle.put(child)
        if "error" in answer:
            raise DataError(f"the chat template refuses the prompt of row {start + answer['index']}: {answer['error']}")
        return list(answer["lengths"])

    lengths: list[int] = []
    with ExitStack() as processes, ThreadPoolExecutor(workers, "prompt lengths") as pool:
        processes.callback(pool.shutdown, cancel_futures=True)
        opening = [pool.submit(processes.enter_context, running_process(model_path, template)) for _ in range(workers)]
        for each in opening:
            idle.put(each.result())
        for found in pool.map(measure, starts):
            lengths += found
            if time.monotonic() - reported_at > QUIET_SECONDS:
                reported_at = time.monotonic()
                seconds = round(reported_at - begun, 1)
                log.info(
                    "counting prompts' tokens",
                    extra={"counted": len(lengths), "prompts": len(prompts), "seconds": seconds, "workers": workers},
                )
    return lengths
