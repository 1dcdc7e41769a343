"""A task: one dataset row that a group of trajectories shall answer.

A task is issued once, under a dense integer group id, and keeps that id through every hop and every crash: the id is
what the ledger, the plans and the checkpoints count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any

TASK_SCHEMA = 1
IMAGE_MARK = "<image>"


class Lane(StrEnum):
    """Which set of streams a task travels: training and evaluation never mix."""

    TRAIN = "train"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat prompt.

    Attributes:
        role, content: as chat templates know them.
        images: encoded, each where the content has ``IMAGE_MARK``; without any, such a mark is text like any other. A
            task's messages have theirs in ``Task.images``.
        marks: where in the content the marks of images begin; None: all there are stand for images.
    """

    role: str
    content: str
    images: tuple[bytes, ...] = ()
    marks: tuple[int, ...] | None = None

    @classmethod
    def of_texts(cls, role: str, texts: Sequence[str], images: Sequence[bytes]) -> "Message":
        """Make a message of what stands before, between and behind its images, whatever these texts have in them."""
        content = IMAGE_MARK.join(texts)
        if not images or content.count(IMAGE_MARK) == len(texts) - 1:
            return cls(role, content, tuple(images))
        ends = accumulate(len(text) + len(IMAGE_MARK) for text in texts[:-1])
        return cls(role, content, tuple(images), tuple(end - len(IMAGE_MARK) for end in ends))

    @property
    def texts(self) -> list[str]:
        """What stands before, between and behind its images."""
        if not self.images:
            return [self.content]
        if self.marks is None:
            return self.content.split(IMAGE_MARK)
        starts = [0, *(mark + len(IMAGE_MARK) for mark in self.marks)]
        ends = [*self.marks, len(self.content)]
        return [self.content[start:end] for start, end in zip(starts, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class Task:
    """What a rollout needs to sample one group.

    Attributes:
        group_id: dense integer in issue order, from 0; unique within an experiment's lane.
        row: index of the dataset row it was made from.
        messages: the chat prompt; rendered by the rollout through the model's chat template.
        label: what the verifier compares with, if the dataset has one.
        data_source: name that chooses among verifiers, if the dataset has one.
        metadata: further columns of the row, handed to custom verifiers and graders unchanged.
        group_size: number of trajectories to sample, at least 1.
        seed: 63-bit seed; sample ``i`` of the group uses ``sample_seed(seed, i)``.
        min_version: no token of the group may be sampled by an older policy version.
        pinned_version: if set, every token is sampled by exactly this version (evaluation).
        greedy: take the most likely token instead of sampling (evaluation).
        issued_at: seconds since the epoch.
        images: encoded pictures of the prompt, in order, once for the whole group; each stands where a message has
            ``IMAGE_MARK``. Without any, such a mark is text like any other.
        settings: keys of the spec that were changed while it ran, by path, with the values that hold for this group.
    """

    group_id: int
    row: int
    messages: tuple[Message, ...]
    group_size: int
    seed: int
    label: str | None = None
    data_source: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    min_version: int = 0
    pinned_version: int | None = None
    greedy: bool = False
    issued_at: float = 0.0
    images: tuple[bytes, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown_messages(self) -> tuple[Message, ...]:
        """The messages, each with its images."""
        return with_images(self.messages, self.images)

    @property
    def lane(self) -> Lane:
        """Which set of streams it travels."""
        return Lane.TRAIN if self.pinned_version is None else Lane.EVALUATION

    def to_wire(self) -> dict[str, Any]:
        """Make a plain mapping of it, for msgpack."""
        wire = {
            "schema": TASK_SCHEMA,
            "group_id": self.group_id,
            "row": self.row,
            "messages": [[message.role, message.content] for message in self.messages],
            "group_size": self.group_size,
            "seed": self.seed,
            "label": self.label,
            "data_source": self.data_source,
            "metadata": dict(self.metadata),
            "min_version": self.min_version,
            "pinned_version": self.pinned_version,
            "greedy": self.greedy,
            "issued_at": self.issued_at,
        }
        # Text alone is the same bytes as before there were images. A picture that comes twice is there once.
        if self.images:
            distinct = list(dict.fromkeys(self.images))
            wire |= {"images": distinct, "image_order": [distinct.index(image) for image in self.images]}
        if self.settings:
            wire["settings"] = dict(self.settings)
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> "Task":
        """Read what ``to_wire`` made.

        Raises:
            ValueError: the mapping has another schema version.
        """
        if wire.get("schema") != TASK_SCHEMA:
            raise ValueError(f"task has schema {wire.get('schema')!r}, this version reads {TASK_SCHEMA}")
        fields = dict(wire)
        del fields["schema"]
        distinct, order = fields.pop("images", ()), fields.pop("image_order", ())
        messages: Sequence[Sequence[str]] = fields.pop("messages")
        images = tuple([distinct[number] for number in order])
        return cls(messages=tuple([Message(role, content) for role, content in messages]), images=images, **fields)


def with_images(messages: Sequence[Message], images: Sequence[bytes]) -> tuple[Message, ...]:
    """Give messages the images of their marks, in order; the last one has all that are left."""
    if not images:
        return tuple(messages)
    found, at = [], 0
    for number, message in enumerate(messages):
        end = at + message.content.count(IMAGE_MARK) if number + 1 < len(messages) else len(images)
        found.append(Message(message.role, message.content, tuple(images[at:end])))
        at = end
    return tuple(found)


def sample_seed(seed: int, index: int) -> int:
    """Derive the seed of one sample of a group: the same in every process and after every restart.

    SplitMix64 of ``seed + (index + 1) * golden``, cut to 63 bits so that it fits a signed integer.

    Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    state = (seed + (index + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (state ^ (state >> 31)) & 0x7FFFFFFFFFFFFFFF
