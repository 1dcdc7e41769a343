"""The child process that counts prompts' tokens. It needs transformers' tokenizers and keeps torch out.

It loads ``{model, input_template, options}``, and reports whether the tokenizer has a chat template. It answers
``{prompts: [[[role, content], ...], ...]}`` by ``{lengths: [...]}``, where ``show`` is true also with ``texts``; or
``{conversations: [[[role, content], ...], ...], starts: [...]}`` by ``{rendered: [[token ids, loss mask], ...]}``, of
which the assistant's turns from the start on are learned; or by ``{error, index}``.
"""

from base64 import b64decode
from typing import Any

from flotilla.shared.children.serving import serve
from flotilla.shared.errors import ModelError
from flotilla.shared.net.absence import absent_or


def count(
    tokenizer: Any,
    template: Any,
    prompts: list[list[list[str]]],
    *,
    show: bool = False,
    images: list[list[str]] | None = None,
    processor: Any = None,
) -> dict[str, Any]:
    """Count the tokens of each prompt, as the model would be given them; ``show`` returns them as text, too.

    ``images`` are those of each prompt, in base64, which ``processor`` processes.
    """
    from flotilla.shared.schemas.task import Message, with_images

    lengths: list[int] = []
    texts: list[str] = []
    for index, prompt in enumerate(prompts):
        try:
            messages = [Message(role, content) for role, content in prompt]
            if images is not None and images[index]:
                shown = [b64decode(image) for image in images[index]]
                processor.check_row(messages)
                token_ids = template.illustrated_ids(tokenizer, with_images(messages, shown), processor)
            else:
                token_ids = template.token_ids(tokenizer, messages)
            lengths.append(len(token_ids))
            if show:
                texts.append(tokenizer.decode(token_ids))
        except Exception as error:  # a chat template may raise whatever it likes
            return {"error": f"{type(error).__name__}: {error}"[:500], "index": index}
    return {"lengths": lengths, "texts": texts} if show else {"lengths": lengths}


def render(tokenizer: Any, template: Any, conversations: list[list[list[str]]], starts: list[int]) -> dict[str, Any]:
    """Render whole conversations."""
    from flotilla.shared.models.prompts import render as rendered_by
    from flotilla.shared.schemas.task import Message

    rendered: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for index, (conversation, start) in enumerate(zip(conversations, starts, strict=True)):
        try:
            found = rendered_by(tokenizer, template, [Message(role, content) for role, content in conversation], start)
        except Exception as error:  # a chat template may raise whatever it likes
            return {"error": f"{type(error).__name__}: {error}"[:500], "index": index}
        rendered.append((found.token_ids, found.loss_mask))
    return {"rendered": rendered}


class Tokens:
    """The tokenizer, and what is put around prompts.

    Raises:
        ModelError, Unavailable: it cannot be loaded, or not now.
    """

    def __init__(self, opening: Any) -> None:
        from flotilla.shared.config.sections.images import ImagesConfig
        from flotilla.shared.models.prompts import PromptTemplate, keep_torch_out, load_tokenizer
        from flotilla.shared.vision.processor import processor_of

        keep_torch_out()
        self._template = PromptTemplate(opening["input_template"], opening["options"])
        try:
            self._tokenizer = load_tokenizer(opening["model"])
            images = opening.get("images")
            self._processor = None if images is None else processor_of(opening["model"], ImagesConfig(**images))
        except ModelError:
            raise
        except ImportError as error:
            words = f"{error}: counting tokens needs transformers: install flotilla[tokenizer]"
            raise ModelError(words) from error
        except Exception as error:  # whatever a broken tokenizer raises
            raise absent_or(error, ModelError(str(error))) from error
        self.about = bool(self._tokenizer.chat_template)

    def handle(self, asked: Any) -> object:
        """Count or render."""
        if "conversations" in asked:
            return render(self._tokenizer, self._template, asked["conversations"], asked["starts"])
        images, show = asked.get("images"), asked.get("show", False)
        processor = self._processor
        return count(self._tokenizer, self._template, asked["prompts"], show=show, images=images, processor=processor)


if __name__ == "__main__":
    serve(Tokens)
