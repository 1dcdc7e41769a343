"""A taskset of verifiers 0.4, written without this fleet in mind: chains of sums, and a harness that asks once.

Any other harness of the package, or of yours, takes the place of this one: ``--options '{"agent": {"harness": ...}}'``.
"""

import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import verifiers.v1 as vf

__all__ = ["AskOnce", "SumTaskset"]
AUTHORITIES = ssl.create_default_context()
"""Read once: a client that reads them itself takes longer for that than for its request."""


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float(said_in(trace).rpartition("####")[2].strip() == self.data.answer)

    @vf.metric
    async def words(self, trace: vf.Trace) -> float:
        return float(len(said_in(trace).split()))


def said_in(trace: vf.Trace) -> str:
    """The policy's last answer."""
    messages = [node.message for node in trace.nodes if node.message.role == "assistant"]
    return str(messages[-1].content or "") if messages else ""


class SumConfig(vf.TasksetConfig):
    path: str
    """Problems that examples/arithmetic/prepare.py made."""
    num_rows: int = 2000


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> Iterator[SumTask]:
        lines = Path(self.config.path).read_text(encoding="utf-8").splitlines()
        for line in lines[: self.config.num_rows]:
            problem = json.loads(line)
            yield SumTask(SumData(prompt=problem["prompt"], answer=str(problem["answer"])), self.config.task)


class AskOnce(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        _, prompt = self.resolve_prompt(data)
        body = {"model": ctx.model, "messages": [{"role": "user", "content": prompt}]}
        async with httpx.AsyncClient(timeout=600, verify=AUTHORITIES) as client:
            headers = {"Authorization": f"Bearer {secret}"}
            answer = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        if answer.status_code != 200:
            return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
