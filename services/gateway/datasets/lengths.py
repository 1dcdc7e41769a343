"""Counts the tokens of many prompts in child processes, so that the gateway itself loads no tokenizer.

Called on a thread. Setting ``stop`` ends it within one batch.
"""

import logging
import queue
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from flotilla.shared.children.calls import BlockingCalls, CallProcess, running
from flotilla.shared.children.processes import python_module
from flotilla.shared.children.spawning import child_environment
from flotilla.shared.config.sections.images import ImagesConfig
from flotilla.shared.errors import DataError, InvalidSpec, ModelError, Unavailable, WorkerDied
from flotilla.shared.models.prompts import PromptTemplate
from flotilla.shared.schemas.task import Message

log = logging.getLogger(__name__)

BATCH: Final = 256
IMAGE_BATCH: Final = 4
"""Prompts with images that are sent together: they are megabytes."""
QUIET_SECONDS: Final = 2.0
"""Interval of progress reports."""
ANSWER_SECONDS: Final = 300.0
"""Longest time for a batch of prompts, or for loading the tokenizer; a child that takes longer is killed."""


class LengthProcess:
    """One child process. A process that died is started again by the next question.

    Args:
        process: that was started.
        calls: of it.

    Attributes:
        has_chat_template: whether the tokenizer brings one.
    """

    def __init__(self, process: CallProcess, calls: BlockingCalls) -> None:
        self._process, self._calls = process, calls
        self.has_chat_template = bool(calls.about)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            DataError: the process ended.
            Unavailable: it was killed, such as for memory.
            DeadlineExceeded: it did not answer within ``ANSWER_SECONDS``, and was killed.
        """
        try:
            answer: dict[str, Any] = self._calls.call(request, seconds=ANSWER_SECONDS)
        except WorkerDied as error:
            raise (Unavailable if self._process.was_killed else DataError)(error.detail) from error
        return answer


@contextmanager
def running_process(
    model_path: str, template: PromptTemplate, images: ImagesConfig | None = None
) -> Iterator[LengthProcess]:
    """Start a child process and load the tokenizer in it, and the processor of images; ends it afterwards.

    What it knows of the tokenizer is in ``has_chat_template``.

    Raises:
        ModelError: the tokenizer cannot be loaded.
        Unavailable, DeadlineExceeded: it cannot be loaded now.
    """
    opening = {"model": model_path, "input_template": template.input_template, "options": dict(template.options)}
    opening |= {"images": None if images is None else images.model_dump(mode="json")}
    process = CallProcess(
        python_module("flotilla.services.gateway.datasets.length_worker"),
        opening,
        "what counts prompts' tokens",
        environment=child_environment(
            TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1"
        ),
        start_seconds=ANSWER_SECONDS,
    )
    with ExitStack() as stack:
        try:
            calls = stack.enter_context(running(process))
        except WorkerDied as error:
            raise Unavailable(error.detail) from error
        except (InvalidSpec, ModelError) as error:
            raise ModelError(error.detail, path=model_path) from error
        yield LengthProcess(process, calls)


def asked(prompts: Sequence[Sequence[Message]], images: Sequence[Sequence[bytes]] = ()) -> dict[str, Any]:
    """Make a request that counts prompts, with the images of each."""
    request: dict[str, Any] = {"prompts": [[[m.role, m.content] for m in prompt] for prompt in prompts]}
    if any(images):
        request["images"] = [[b64encode(image).decode() for image in each] for each in images]
    return request


def prompt_lengths(
    prompts: Sequence[Sequence[Message]],
    model_path: str,
    template: PromptTemplate,
    *,
    workers: int,
    stop: threading.Event | None = None,
    images: ImagesConfig | None = None,
    images_of: Callable[[int], Sequence[bytes]] = lambda _: (),
) -> list[int]:
    """Count the tokens of each prompt.

    Args:
        prompts: messages of each.
        model_path: directory with the tokenizer.
        template: what is put around them.
        workers: child processes.
        stop: ends the count early.
        images: how they are processed; None where prompts have none.
        images_of: returns those of a prompt, by its number.

    Raises:
        ModelError: the tokenizer cannot be loaded.
        DataError: the chat template refuses a prompt, a process died, or ``stop`` was set.
        Unavailable: a process was killed, or something else is in the way that passes.
    """
    size = BATCH if images is None else IMAGE_BATCH
    starts = range(0, len(prompts), size)
    workers = max(min(workers, len(starts)), 1)
    idle: queue.SimpleQueue[LengthProcess] = queue.SimpleQueue()
    begun = reported_at = time.monotonic()

    def measure(start: int) -> list[int]:
        if stop is not None and stop.is_set():
            raise DataError("counting prompts' tokens was stopped")
        child = idle.get()
        try:
            numbers = range(start, min(start + size, len(prompts)))
            answer = child.ask(asked([prompts[n] for n in numbers], [images_of(n) for n in numbers]))
        finally:
            idle.put(child)
        if "error" in answer:
            raise DataError(f"the chat template refuses the prompt of row {start + answer['index']}: {answer['error']}")
        return list(answer["lengths"])

    lengths: list[int] = []
    with ExitStack() as processes, ThreadPoolExecutor(workers, "prompt lengths") as pool:
        processes.callback(pool.shutdown, cancel_futures=True)
        opening = [
            pool.submit(processes.enter_context, running_process(model_path, template, images)) for _ in range(workers)
        ]
        for each in opening:
            idle.put(each.result())
        for found in pool.map(measure, starts):
            lengths += found
            if time.monotonic() - reported_at > QUIET_SECONDS:
                reported_at = time.monotonic()
                _say(len(lengths), len(prompts), reported_at - begun, workers)
    return lengths


def _say(counted: int, num_prompts: int, seconds: float, workers: int) -> None:
    facts = {"counted": counted, "prompts": num_prompts, "seconds": round(seconds, 1), "workers": workers}
    log.info("counting prompts' tokens", extra=facts)
