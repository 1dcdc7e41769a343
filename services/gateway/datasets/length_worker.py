"""The child process that counts prompts' tokens. It needs transformers' tokenizers and keeps torch out.

It reads one JSON object per line and answers each by one: first ``{model, input_template, options}`` by
``{has_chat_template}``, then ``{prompts: [[[role, content], ...], ...]}`` by ``{lengths: [...]}``, where ``show`` is
true also with ``texts``; or ``{conversations: [[[role, content], ...], ...], starts: [...]}`` by ``{rendered: [[token
ids, loss mask], ...]}``, of which the assistant's turns from the start on are learned; or by
``{error, index?, passes?}``. It ends with its input.
"""

import json
import sys
from typing import Any


def count(tokenizer: Any, template: Any, prompts: list[list[list[str]]], *, show: bool = False) -> dict[str, Any]:
    """Count the tokens of each prompt, as the model would be given them; ``show`` returns them as text, too."""
    from flotilla.shared.schemas.task import Message

    lengths: list[int] = []
    texts: list[str] = []
    for index, prompt in enumerate(prompts):
        try:
            token_ids = template.token_ids(tokenizer, [Message(*message) for message in prompt])
            lengths.append(len(token_ids))
            if show:
                texts.append(tokenizer.decode(token_ids))
        except Exception as error:  # a chat template may raise whatever it likes
            return {"error": f"{type(error).__name__}: {error}"[:500], "index": index}
    return {"lengths": lengths, "texts": texts} if show else {"lengths": lengths}


def render(tokenizer: Any, template: Any, conversations: list[list[list[str]]], starts: list[int]) -> dict[str, Any]:
    """Render whole conversations."""
    from flotilla.shared.models.conversations import render as rendered_by
    from flotilla.shared.schemas.task import Message

    rendered: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for index, (conversation, start) in enumerate(zip(conversations, starts, strict=True)):
        try:
            found = rendered_by(tokenizer, template, [Message(*message) for message in conversation], start)
        except Exception as error:  # a chat template may raise whatever it likes
            return {"error": f"{type(error).__name__}: {error}"[:500], "index": index}
        rendered.append((found.token_ids, found.loss_mask))
    return {"rendered": rendered}


def main() -> None:
    """Answer until the input ends."""
    from flotilla.shared.models.prompts import PromptTemplate, keep_torch_out, load_tokenizer
    from flotilla.shared.net.absence import may_pass

    keep_torch_out()
    replies, sys.stdout = sys.stdout, sys.stderr
    tokenizer: Any = None
    reply: dict[str, Any]
    template = PromptTemplate()
    for line in sys.stdin:
        request = json.loads(line)
        if "model" in request:
            template = PromptTemplate(request["input_template"], request["options"])
            try:
                tokenizer = load_tokenizer(request["model"])
                reply = {"has_chat_template": bool(tokenizer.chat_template)}
            except ImportError as error:
                reply = {"error": f"{error}: counting tokens needs transformers: install flotilla[tokenizer]"}
            except Exception as error:  # whatever a broken tokenizer raises
                reply = {"error": str(error), "passes": may_pass(error)}
        elif "conversations" in request:
            reply = render(tokenizer, template, request["conversations"], request["starts"])
        else:
            reply = count(tokenizer, template, request["prompts"], show=request.get("show", False))
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
