"""The conversations of one episode, as tokens: what continues a recorded reply is appended, anything else is a branch.

Clients send a whole conversation with every request. Its longest beginning that was recorded here is found by what its
messages say, and stays the tokens that the engine sampled: only what comes behind it is tokenised. A conversation that
continues from an earlier reply, or that cannot be appended to (another template render, edited messages), begins a
trajectory of its own. There earlier replies are context: each sampled token is trained in one trajectory, once.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flotilla.services.rollout.agents.requests import (
    SentImages,
    canonical,
    characters_of,
    images_in,
    plain_messages,
)
from flotilla.services.rollout.agents.template import ChatTemplate
from flotilla.services.rollout.engines.base import Completion
from flotilla.services.rollout.engines.requests import condensed
from flotilla.services.rollout.trajectory_builder import RenderTally, TrajectoryBuilder
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.prompt_image import PromptImage, moved, within
from flotilla.shared.schemas.routing import RoutedSpan
from flotilla.shared.schemas.trajectory import FinishReason, Trajectory
from flotilla.shared.vision.processor import without_cuts

Messages = Sequence[Mapping[str, Any]]


class ContextTooLong(InvalidRequest):
    """The conversation leaves no room for a reply."""

    code, title, status = "context_length_exceeded", "The conversation is too long", 400


@dataclass(frozen=True, slots=True)
class ContextBound:
    """How much an engine's context may hold.

    Attributes:
        tokens: of the context, the reply's included.
        longest: characters of the longest token.
    """

    tokens: int
    longest: int

    def check_text(self, num_characters: int) -> None:
        """Check that a text may fit.

        Raises:
            ContextTooLong: it cannot, even in the longest tokens.
        """
        most = self.tokens * self.longest
        if num_characters > most:
            raise ContextTooLong(
                f"the conversation has {num_characters} characters, and {self.tokens} tokens, all that the engine's "
                f"context holds with the reply, have {most} at most (rollout.engine.context_tokens)"
            )

    def check_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Check that the texts of plain messages may fit; a template may leave out what the assistant said.

        Raises:
            ContextTooLong: they cannot.
        """
        self.check_text(sum(characters_of(each) for each in messages if each.get("role") != "assistant"))

    def check_tokens(self, num_tokens: int) -> None:
        """Check that a prompt leaves room for a reply.

        Raises:
            ContextTooLong: it does not.
        """
        if num_tokens >= self.tokens:
            raise ContextTooLong(
                f"the conversation has {num_tokens} tokens, and the engine's context holds {self.tokens} with the "
                "reply (rollout.engine.context_tokens)"
            )


class TooManyBranches(InvalidRequest):
    """The episode has as many conversations as it may have."""

    code, title, status = "too_many_branches", "Too many branches", 400


@dataclass(eq=False)
class Branch:
    """One trajectory in the making."""

    builder: TrajectoryBuilder
    is_busy: bool = False
    finish_reason: FinishReason = FinishReason.STOP


@dataclass(frozen=True, eq=False)
class Reply:
    """A recorded reply: where one may continue from.

    Attributes:
        num_tokens: of its branch, up to its end.
        history: messages up to the reply, which is the last; of a text completion none.
        prompt: of a text completion.
        endings: of a text completion, what clients may have of it: all that was sampled; up to the end of the stop
            string; without that, as they were given it.
    """

    branch: Branch
    num_tokens: int
    history: tuple[Mapping[str, Any], ...] = ()
    prompt: str = ""
    endings: tuple[str, ...] = ()

    def num_known(self, text: str) -> int:
        """Count the characters of a text that are this completion and its prompt; 0 if the text does not continue it.

        The longest of its endings counts: what a client has of a stop string is not shown to the policy again.
        """
        if not text.startswith(self.prompt):
            return 0
        known = [len(self.prompt) + len(each) for each in self.endings if text.startswith(each, len(self.prompt))]
        # The same prompt again asks for another completion, even of one that had no text.
        return max((each for each in known if each > len(self.prompt) or len(text) > each), default=0)


@dataclass(frozen=True, eq=False)
class Prompt:
    """What a completion is asked for behind. Making one changes nothing, so it may be made on a thread.

    Attributes:
        token_ids: behind ``reply``, or all.
        text: the same, for people.
        reply: the recorded reply that it continues.
        is_refused: a reply was found, but the template renders it in another way once something follows.
        said: of a text completion, the whole prompt.
        images: among ``token_ids``.
    """

    token_ids: tuple[int, ...]
    text: str
    reply: Reply | None = None
    is_refused: bool = False
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    said: str = ""
    images: tuple[PromptImage, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Count the tokens of all, those up to the reply included."""
        return len(self.token_ids) + (0 if self.reply is None else self.reply.num_tokens)


@dataclass(eq=False)
class Draft:
    """A completion that is being sampled; nothing is recorded before it is kept.

    Attributes:
        prompt_ids: all tokens before it.
        shown: the last of them, which its branch does not have yet.
        images: among all tokens.
    """

    branch: Branch
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    shown: tuple[int, ...]
    is_new: bool
    images: tuple[PromptImage, ...] = ()

    @property
    def read_ids(self) -> tuple[int, ...]:
        """The prompt with one token of each image."""
        return condensed(self.prompt_ids, self.images)


@dataclass
class Conversations:
    """All conversations of one episode.

    Attributes:
        template: of the model.
        context_tokens: of the engine.
        max_branches: trajectories at most.
        tally: counts renders.
        max_images: that a prompt may have.
    """

    template: ChatTemplate
    context_tokens: int
    max_branches: int
    tally: RenderTally = field(default_factory=RenderTally)
    max_images: int = 0

    def __post_init__(self) -> None:
        self._branches: list[Branch] = []
        self._replies: dict[bytes, Reply] = {}
        self._texts: list[Reply] = []
        self._num_begun = 0
        self._sent = SentImages()

    @cached_property
    def bound(self) -> ContextBound:
        """What the engine's context may hold."""
        return ContextBound(self.context_tokens, self.template.longest_token)

    def chat_prompt(self, messages: Messages, tools: Messages) -> Prompt:
        """Render and tokenise a chat, or what of it continues a recorded reply.

        Raises:
            InvalidRequest: the template does not take it.
            ContextTooLong: it does not fit the engine's context.
        """
        plain = plain_messages(messages, self._sent)
        self._check_images(len(images_in(plain)))
        self.bound.check_messages(plain)
        names = _names(plain, tools)
        given: dict[str, Any] = {"messages": tuple(plain), "tools": tuple(tools)}
        for count in range(len(plain) - 1, 0, -1):
            reply = self._replies.get(names[count])
            if reply is None:
                continue
            last = reply.branch.builder.token_ids[reply.num_tokens - 1]
            new = plain[count:]
            added = self.template.continuation([*reply.history], [*reply.history, *new], tools, last, images_in(new))
            if added is None:
                given["is_refused"] = True
                break
            return Prompt(added.token_ids, added.text, reply, images=added.images, **given)
        text = self.template.prompt(plain, tools)
        self.bound.check_text(len(text))
        token_ids, images = self.template.illustrated(text, images_in(plain))
        return Prompt(token_ids, without_cuts(text), images=images, **given)

    def _check_images(self, count: int) -> None:
        if count and not self.max_images:
            raise InvalidRequest("messages have images, and the policy is shown none: the spec has no data.images")
        if count > self.max_images:
            raise InvalidRequest(
                f"messages have {count} images, and a prompt {self.max_images} at most (data.images.max_per_prompt)"
            )

    def text_prompt(self, prompt: str | Sequence[int]) -> Prompt:
        """Tokenise a text, or what of it, or of token ids, continues a recorded completion.

        Raises:
            ContextTooLong: it does not fit the engine's context.
        """
        if not isinstance(prompt, str):
            return self._of_tokens(tuple(prompt))
        self.bound.check_text(len(prompt))
        reply = max(self._texts, key=lambda each: each.num_known(prompt), default=None)
        known = 0 if reply is None else reply.num_known(prompt)
        added = prompt[known:]
        return Prompt(self.template.token_ids(added), added, reply if known else None, said=prompt)

    def _of_tokens(self, prompt: tuple[int, ...]) -> Prompt:
        self.bound.check_tokens(len(prompt))
        said = self.template.text(prompt, with_special_tokens=True)
        found = [
            reply
            for reply in self._texts
            if prompt[: reply.num_tokens] == reply.branch.builder.token_ids[: reply.num_tokens]
        ]
        reply = max(found, key=lambda each: each.num_tokens, default=None)
        added = prompt if reply is None else prompt[reply.num_tokens :]
        return Prompt(added, self.template.text(added, with_special_tokens=True), reply, said=said)

    def room_behind(self, num_prompt: int) -> int:
        """Count the tokens that a reply may have behind a prompt.

        Raises:
            ContextTooLong: it may have none.
        """
        self.bound.check_tokens(num_prompt)
        return self.context_tokens - num_prompt

    def begin(self, prompt: Prompt) -> Draft:
        """Begin a completion: it continues with the branch of the reply that it continues, or begins one.

        Raises:
            InvalidRequest: there is no token before it.
            TooManyBranches: it begins a branch too many; those count that others are sampled for.
        """
        self.tally.refused += prompt.is_refused
        if prompt.reply is None:
            return self._fresh(prompt, prompt.token_ids, prompt.images)
        branch, num_tokens = prompt.reply.branch, prompt.reply.num_tokens
        recorded = branch.builder.token_ids
        if prompt.token_ids and not branch.is_busy and num_tokens == len(recorded):
            branch.is_busy = True
            whole = (*branch.builder.images, *moved(prompt.images, num_tokens))
            return Draft(branch, prompt, recorded + prompt.token_ids, prompt.token_ids, is_new=False, images=whole)
        images = (*within(branch.builder.images, 0, num_tokens), *moved(prompt.images, num_tokens))
        return self._fresh(prompt, recorded[:num_tokens] + prompt.token_ids, images)

    def _fresh(self, prompt: Prompt, prompt_ids: tuple[int, ...], images: tuple[PromptImage, ...]) -> Draft:
        if not prompt_ids:
            raise InvalidRequest("the prompt has no token")
        if len(self._branches) + self._num_begun >= self.max_branches:
            raise TooManyBranches(
                f"the episode has {self.max_branches} conversations that do not continue each other already "
                "(rollout.agents.max_branches)"
            )
        self._num_begun += 1
        branch = Branch(TrajectoryBuilder(self.tally), is_busy=True)
        return Draft(branch, prompt, prompt_ids, prompt_ids, is_new=True, images=images)

    def keep(
        self,
        draft: Draft,
        completion: Completion,
        text: str,
        reply: Mapping[str, Any] | None,
        endings: tuple[str, ...] = (),
        experts: RoutedSpan | None = None,
    ) -> None:
        """Record a completion.

        Args:
            text: of it, for people.
            reply: the message that the client is given; None for a text completion.
            endings: of a text completion, as in ``Reply``.
            experts: of the completion, as the branch's builder cuts them.
        """
        branch, builder = draft.branch, draft.branch.builder
        if draft.is_new:
            self._num_begun -= 1
            self._branches.append(branch)
        builder.show(draft.shown, draft.prompt.text, images=draft.images if draft.is_new else draft.prompt.images)
        builder.sample(
            completion.token_ids,
            completion.log_probs,
            completion.versions,
            completion.finish_reason,
            text,
            experts,
        )
        branch.is_busy, branch.finish_reason = False, completion.finish_reason
        if reply is None:
            self._texts.append(Reply(branch, builder.num_tokens, prompt=draft.prompt.said, endings=endings))
            return
        history = (*draft.prompt.messages, *plain_messages([reply]))
        self._replies[_names(history, draft.prompt.tools)[-1]] = Reply(branch, builder.num_tokens, history)

    def drop(self, draft: Draft) -> None:
        """Forget a completion that did not come about."""
        draft.branch.is_busy = False
        self._num_begun -= draft.is_new

    @property
    def num_branches(self) -> int:
        """Conversations that have a sampled token."""
        return len(self._branches)

    def building(self, **fields: Any) -> Callable[[], list[Trajectory]]:
        """Take what there is; calling the result makes its trajectories, oldest first, for as long as that takes."""
        taken = [(branch.builder.snapshot(), branch.finish_reason) for branch in self._branches]
        return lambda: [builder.build(finish_reason, **fields) for builder, finish_reason in taken]


def _names(messages: Messages, tools: Messages) -> list[bytes]:
    """Name every beginning of a conversation, from that without a message on."""
    name = hashlib.sha256(json.dumps(list(tools), sort_keys=True, default=str).encode()).digest()
    names = [name]
    for message in messages:
        name = hashlib.sha256(name + canonical(message).encode("utf-8", "replace")).digest()
        names.append(name)
    return names
