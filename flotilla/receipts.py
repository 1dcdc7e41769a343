"""What a checkpoint was trained on, as a signed file that can be checked against the run's folder later.

JSON lines: a head with the checkpoint's files, spec, graders and software; a line for each file of samples and each
group in it; a signature over all of them. Memory holds one file of samples.
"""

import contextlib
import hashlib
import json
import os
import secrets
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgpack
from pydantic import TypeAdapter

from flotilla.shared.checkpoints.folders import READ_BYTES, STATE_FILE, StoredCheckpoint
from flotilla.shared.checkpoints.lineage import ROOT, follow
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.reward import CustomConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidRequest, Unavailable
from flotilla.shared.files.beneath import FOLDER as BENEATH_FOLDER
from flotilla.shared.samples.folder import SAMPLES, StoredFile, open_samples_file, stored_files
from flotilla.shared.samples.table import facts_of, to_groups
from flotilla.shared.schemas.sample_kinds import KeptGroup
from flotilla.shared.schemas.trajectory import Trajectory

FORMAT: Final = 1
FOLDER: Final = "receipts"
"""Within an experiment's directory."""
KEY_FILE: Final = "receipt.key"
"""Of the user's own key, which is made where none is named."""
LONGEST_REASON: Final = 300
"""Of what is wrong with a receipt, in characters."""


@dataclass(frozen=True, slots=True)
class Head:
    """The checkpoint.

    Attributes:
        receipt: version of the format.
        experiment_id, step, version, lineage: of the checkpoint.
        num_groups: ids that its state records as trained.
        files: SHA-256 of each of its files.
        spec_sha256: of the spec in its state, as sorted JSON; live changes are part of it.
        graders: of each component, by its path in the spec: SHA-256 of the section, and of a custom function's file.
        software: versions that trained it, by package, and that of Flotilla that wrote this.
        missing_steps: steps up to it without whole samples here: their groups are known by the lineage alone.
        public_key: PEM, of the signature.
    """

    receipt: int
    experiment_id: str
    step: int
    version: int
    lineage: str
    num_groups: int
    files: Mapping[str, str]
    spec_sha256: str
    graders: Mapping[str, Sequence[str]]
    software: Mapping[str, str]
    missing_steps: Sequence[int]
    public_key: str


@dataclass(frozen=True, slots=True)
class SamplesLine:
    """A file of samples; ``parent`` and ``lineage`` of a trained step."""

    samples: str
    sha256: str
    parent: str
    lineage: str


@dataclass(frozen=True, slots=True)
class GroupLine:
    """A group of the file before it.

    Attributes:
        group_id, row: of the dataset.
        outcome: ``trained``, or how and why it ended.
        prompt_sha256: of the task: messages, label, source, metadata, images and the prompt as rendered.
        versions: per member, run-length ``(start, version)`` over its tokens.
        trajectories: per member, SHA-256 of all that was sampled.
        grades: per member, SHA-256 of all that graders said.
        rewards: per member.
    """

    group_id: int
    row: int
    outcome: str
    prompt_sha256: str
    versions: Sequence[Sequence[Sequence[int]]]
    trajectories: Sequence[str]
    grades: Sequence[str]
    rewards: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Signature:
    """The last line: of all before it, in hexadecimal."""

    signature: str


_HEAD: Final = TypeAdapter(Head)
_LINE: Final = TypeAdapter[SamplesLine | GroupLine | Signature](SamplesLine | GroupLine | Signature)


def write(checkpoint: StoredCheckpoint, output: Path, key: Path) -> Head:
    """Write the receipt of a checkpoint; blocks, and reads every file once.

    Args:
        checkpoint: complete.
        output: replaced at once when all is written; no link below the experiment's folder is followed to it.
        key: PEM of a private key, Ed25519 or EC.

    Raises:
        InvalidRequest: a file of samples cannot be read, or openssl refuses the key.
        Unavailable: openssl is missing.
        OSError: a file cannot be read or written.
    """
    directory = checkpoint.path.parent.parent
    files = _samples_until(directory, checkpoint)
    whole = {file.number for file in files if file.family == "step" and _facts(directory, file)[2]}
    head = Head(
        receipt=FORMAT,
        experiment_id=checkpoint.state.experiment_id,
        step=checkpoint.step,
        version=checkpoint.state.version,
        lineage=checkpoint.state.lineage,
        num_groups=checkpoint.state.num_trained,
        files={name: _sha256_of(checkpoint, name) for name in sorted({*checkpoint.state.files, STATE_FILE})},
        spec_sha256=_of_json(checkpoint.state.spec),
        graders=graders_of(validate_spec(checkpoint.state.spec)),
        software=dict(checkpoint.state.software) | {"receipt written by flotilla": metadata.version("flotilla")},
        missing_steps=[step for step in range(1, checkpoint.step + 1) if step not in whole],
        public_key=_openssl(["pkey", "-in", str(key), "-pubout"]).decode("ascii"),
    )
    digest = hashlib.sha256()
    with _replacing(output, directory) as target:
        for line in _lines(directory, head, files):
            text = _written(line)
            digest.update(text)
            target.write(text)
        target.write(_written(Signature(sign(digest.hexdigest(), key).hex())))
    return head


@contextlib.contextmanager
def _replacing(output: Path, directory: Path) -> Iterator[BinaryIO]:
    """Write a file that takes its place once it is whole.

    The experiment's folder may come from someone else: its folder for receipts may be a link, and so may the name that
    is written first.
    """
    parent = output.parent
    parent.mkdir(parents=True, exist_ok=True)
    is_beneath = parent == directory / FOLDER
    try:
        at = os.open(parent, BENEATH_FOLDER | (os.O_NOFOLLOW if is_beneath else 0))
    except NotADirectoryError:
        raise InvalidRequest(f"{parent} is no folder, or a link: name another file by --output") from None
    temporary = f".{output.name}.{secrets.token_hex(4)}.tmp"
    try:
        made = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=at)
        try:
            with os.fdopen(made, "wb") as target:
                yield target
                target.flush()
                os.fsync(target.fileno())
            os.replace(temporary, output.name, src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            os.unlink(temporary, dir_fd=at)
            raise
    finally:
        os.close(at)


def _lines(directory: Path, head: Head, files: Sequence[StoredFile]) -> Iterator[Head | SamplesLine | GroupLine]:
    yield head
    for file in files:
        parent, lineage, _ = _facts(directory, file)
        yield SamplesLine(file.name, _sha256_of_samples(directory, file.name), parent, lineage)
        for kept in _groups(directory, file.name):
            yield group_line(kept)


def group_line(kept: KeptGroup) -> GroupLine:
    """Describe a recorded group."""
    task, members = kept.group.task, kept.group.trajectories
    return GroupLine(
        group_id=task.group_id,
        row=task.row,
        outcome=kept.kind.value if kept.reason is None else f"{kept.kind.value}: {kept.reason}",
        prompt_sha256=_of_wire([task.to_wire(), kept.group.prompt]),
        versions=[[list(run) for run in each.versions] for each in members],
        trajectories=[_of_wire(each.sampled_to_wire()) for each in members],
        grades=[_of_wire(_grade(each)) for each in members],
        rewards=[each.reward for each in members],
    )


def _grade(trajectory: Trajectory) -> list[Any]:
    # What came of a map in parquet has its order, not that of the keys.
    wire = trajectory.grade_to_wire()
    return [[name, sorted(value.items()) if isinstance(value, dict) else value] for name, value in sorted(wire.items())]


def graders_of(spec: ExperimentSpec) -> dict[str, list[str]]:
    """Name each grader of a spec by its section's SHA-256, and that of the file of a custom function."""
    found = {}
    for where, component in spec.reward.graders.items():
        found[where] = [component.kind, _of_json(component.model_dump(mode="json"))]
        if isinstance(component, CustomConfig):
            path = Path(component.path.rpartition(":")[0])
            found[where].append(_sha256(path.open("rb")) if path.is_file() else "")
    return found


@dataclass(frozen=True, slots=True)
class Checked:
    """What a receipt was held against.

    Attributes:
        head: of the receipt.
        files: of the checkpoint.
        samples: files of them.
        groups: in these files.
    """

    head: Head
    files: int
    samples: int
    groups: int


def verify(receipt: Path, checkpoint: StoredCheckpoint, tell: Callable[[str], None]) -> Checked:
    """Hold a receipt against a checkpoint and the samples beside it; blocks.

    Args:
        receipt: as ``write`` wrote it.
        checkpoint: that it is about.
        tell: called with each changed thing, by name.

    Raises:
        InvalidRequest: it is no receipt, or of another checkpoint.
        Unavailable: openssl is missing.
    """
    lines, head, is_signed = _read(receipt)
    if not is_signed:
        tell("receipt: it was changed after it was signed")
    state = checkpoint.state
    if (head.experiment_id, head.step) != (state.experiment_id, checkpoint.step):
        raise InvalidRequest(f"{receipt} is of step {head.step} of {head.experiment_id}, not of {checkpoint.path}")
    for name, expected in head.files.items():
        if _sha256_or_none(partial(_sha256_of, checkpoint, name)) != expected:
            what = "weights" if name.endswith(".safetensors") else "checkpoint"
            tell(f"{what}: {checkpoint.path / name} is missing or has other bytes")
    if _of_json(state.spec) != head.spec_sha256:
        tell("spec: the spec in the checkpoint's state is another")
    for where, found in graders_of(validate_spec(state.spec)).items():
        if list(head.graders.get(where, ())) != found:
            tell(f"grader: {where} is another, or the file of its function is")
    _verify_samples(checkpoint.path.parent.parent, lines, head, tell)
    samples = sum(isinstance(each, SamplesLine) for each in lines)
    return Checked(head, len(head.files), samples, len(lines) - samples)


def _verify_samples(
    directory: Path, lines: Sequence[SamplesLine | GroupLine], head: Head, tell: Callable[[str], None]
) -> None:
    lineage, expected = ROOT, list(lines)
    for place, line in enumerate(expected):
        if not isinstance(line, SamplesLine):
            continue
        if line.lineage and not head.missing_steps:
            if line.parent != lineage:
                tell(f"lineage: {line.samples} continues other weights than those before it")
            lineage = line.lineage
        if _sha256_or_none(partial(_sha256_of_samples, directory, line.samples)) == line.sha256:
            continue
        told = list(_differences(directory, line.samples, _groups_after(expected, place)))
        for what in told or [f"samples: {line.samples} has other bytes beside trajectories and grades"]:
            tell(what)
    if not head.missing_steps and lineage != head.lineage:
        tell("lineage: the samples do not lead to the checkpoint's weights")


def _groups_after(lines: Sequence[SamplesLine | GroupLine], place: int) -> list[GroupLine]:
    found = []
    for line in lines[place + 1 :]:
        if isinstance(line, SamplesLine):
            break
        found.append(line)
    return found


def _differences(directory: Path, name: str, expected: Sequence[GroupLine]) -> Iterator[str]:
    try:
        found = [group_line(kept) for kept in _groups(directory, name)]
    except InvalidRequest as error:
        yield f"samples: {error.detail}"
        return
    if len(found) != len(expected):
        yield f"samples: {name} has {len(found)} groups, and the receipt {len(expected)}"
    for now, was in zip(found, expected, strict=False):
        where = f"group {was.group_id} of {name}"
        if (now.group_id, now.row, now.outcome) != (was.group_id, was.row, was.outcome):
            yield f"outcome: {where} is another group, or ended otherwise"
        if now.prompt_sha256 != was.prompt_sha256:
            yield f"prompt: {where}"
        for what, ours, theirs in (
            ("trajectory", now.trajectories, was.trajectories),
            ("grade", now.grades, was.grades),
        ):
            for member, (one, other) in enumerate(zip(ours, theirs, strict=False)):
                if one != other:
                    yield f"{what}: answer {member} of {where}"


def _read(receipt: Path) -> tuple[list[SamplesLine | GroupLine], Head, bool]:
    digest, lines = hashlib.sha256(), list[SamplesLine | GroupLine]()
    head, signature = None, b""
    try:
        with receipt.open("rb") as source:
            for text in source:
                if head is None:
                    head = _HEAD.validate_json(text)
                else:
                    line = _LINE.validate_json(text)
                    if isinstance(line, Signature):
                        signature = bytes.fromhex(line.signature)
                        break
                    lines.append(line)
                digest.update(text)
            rest = source.read(1)
    except ValueError as error:
        raise InvalidRequest(f"{receipt} is no receipt, or was cut: {str(error)[:LONGEST_REASON]}") from error
    if head is None or head.receipt != FORMAT:
        raise InvalidRequest(f"{receipt} is no receipt that this version reads")
    return lines, head, not rest and is_signed(digest.hexdigest(), signature, head.public_key)


def own_key(environment: Mapping[str, str]) -> Path:
    """Where the user's own key is: beside no run, since a run's folder may come from someone else, with its key."""
    return Path(environment.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "flotilla" / KEY_FILE


def make_key(path: Path) -> None:
    """Create an Ed25519 key readable only by its owner; an existing one stays.

    It is written atomically: a file cut off by a crash would be taken for the key from then on.

    Raises:
        InvalidRequest: what is there is a link, no file, or another user's, or others may read it.
        Unavailable: openssl is missing.
    """
    if os.path.lexists(path):
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode):
            raise InvalidRequest(f"{path} is a link or no file: name the key that signs by --key")
        if about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise InvalidRequest(f"{path} is not yours alone (chmod 600): name the key that signs by --key")
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    pem = _openssl(["genpkey", "-algorithm", "ed25519"])
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    made = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(made, "wb") as target:
            target.write(pem)
            target.flush()
            os.fsync(target.fileno())
        with contextlib.suppress(FileExistsError):  # another call made one meanwhile, which stays
            os.link(temporary, path, follow_symlinks=False)
    finally:
        temporary.unlink()


def sign(digest: str, key: Path) -> bytes:
    """Sign a digest in hexadecimal."""
    with tempfile.TemporaryDirectory(prefix="flotilla-receipt-") as folder:
        content = Path(folder) / "content"
        content.write_text(digest, encoding="ascii")
        return _openssl(["pkeyutl", "-sign", "-rawin", "-inkey", str(key), "-in", str(content)])


def is_signed(digest: str, signature: bytes, public_key: str) -> bool:
    """Whether a signature of a digest is that of a key."""
    with tempfile.TemporaryDirectory(prefix="flotilla-receipt-") as folder:
        content, signed, key = (Path(folder) / name for name in ("content", "signature", "key"))
        content.write_text(digest, encoding="ascii")
        signed.write_bytes(signature)
        key.write_text(public_key, encoding="ascii")
        command = ["pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", str(key), "-in", str(content)]
        try:
            _openssl([*command, "-sigfile", str(signed)])
        except InvalidRequest:
            return False
    return True


def _openssl(arguments: Sequence[str]) -> bytes:
    try:
        result = subprocess.run(("openssl", *arguments), stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except FileNotFoundError:
        raise Unavailable("openssl is not on the PATH: it signs and checks receipts") from None
    if result.returncode != 0:
        words = result.stderr.decode("utf-8", "replace").strip()[-300:]
        raise InvalidRequest(f"openssl {arguments[0]} failed: {words}")
    return result.stdout


def _samples_until(directory: Path, checkpoint: StoredCheckpoint) -> list[StoredFile]:
    """List the samples that led to a checkpoint: its steps in order, then what ended under its versions."""
    found = [
        file
        for file in stored_files(directory / SAMPLES)
        if (file.number <= checkpoint.step if file.family == "step" else file.number <= checkpoint.state.version)
        and file.family != "evaluation"
    ]
    return sorted(found, key=lambda file: (file.family != "step", file.number, file.name))


def _facts(directory: Path, file: StoredFile) -> tuple[str, str, bool]:
    """Read the lineage before and after a step, and whether all its groups are kept with the ids of that lineage."""
    from pyarrow import ArrowException, parquet

    if file.family != "step":
        return "", "", False
    try:
        with open_samples_file(directory / SAMPLES, file.name) as source:
            table = parquet.ParquetFile(source)
            facts = facts_of(table.schema_arrow.metadata)
            ids = table.read(columns=["group_id", "place"])
    except (OSError, ArrowException, ValueError) as error:
        raise InvalidRequest(f"{file.name} cannot be read: {error}") from error
    parent, lineage = str(facts["parent"]), str(facts["lineage"])
    places = dict(zip(ids.column("place").to_pylist(), ids.column("group_id").to_pylist(), strict=True))
    return parent, lineage, follow(parent, file.number, places.values()) == lineage


def _groups(directory: Path, name: str) -> list[KeptGroup]:
    from pyarrow import ArrowException, parquet

    try:
        with open_samples_file(directory / SAMPLES, name) as source:
            return to_groups(parquet.read_table(source))
    except (OSError, ArrowException, ValueError) as error:
        raise InvalidRequest(f"{name} cannot be read: {error}") from error


def _sha256_or_none(read: Callable[[], str]) -> str | None:
    try:
        return read()
    except OSError:
        return None


def _sha256_of(checkpoint: StoredCheckpoint, name: str) -> str:
    return _sha256(checkpoint.open(name))


def _sha256_of_samples(directory: Path, name: str) -> str:
    return _sha256(open_samples_file(directory / SAMPLES, name))


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    with file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _of_json(document: object) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()


def _of_wire(wire: object) -> str:
    packed: bytes = msgpack.packb(wire)
    return hashlib.sha256(packed).hexdigest()


def _written(line: Head | SamplesLine | GroupLine | Signature) -> bytes:
    return json.dumps(asdict(line)).encode() + b"\n"
