"""A teacher for tests: answers as SGLang's ``/generate`` and ``/detokenize`` do, with a model of this machine.

``python -m tests.teacher_server MODEL PORT``
"""

import sys
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


def scored(model: Any, ids: list[int], start: int) -> list[list[Any]]:
    """Make the triples of the positions from ``start`` on; the first has no value."""
    with torch.no_grad():
        log_probs = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].float(), -1)
    chosen = log_probs.gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1).tolist()
    return [[None if place == start else chosen[place - 1], ids[place], None] for place in range(start, len(ids))]


def teacher_app(model: Any, tokenizer: Any) -> Starlette:
    """Make the app."""

    async def generate(request: Request) -> JSONResponse:
        body = await request.json()
        assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}
        assert body["return_logprob"] is True
        entries = scored(model, body["input_ids"], body["logprob_start_len"])
        return JSONResponse({"text": "", "output_ids": [], "meta_info": {"input_token_logprobs": entries}})

    async def detokenize(request: Request) -> JSONResponse:
        ids = (await request.json())["tokens"]
        return JSONResponse({"text": tokenizer.decode(ids, skip_special_tokens=True)})

    return Starlette(
        routes=[Route("/generate", generate, methods=["POST"]), Route("/detokenize", detokenize, methods=["POST"])]
    )


def main() -> None:
    """Serve until ended."""
    import uvicorn
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    path, port = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    app = teacher_app(model, AutoTokenizer.from_pretrained(path))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
