"""A weight image: written once, read by many, never half."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from flotilla.shared.errors import Conflict, WeightTransferFailed
from flotilla.shared.weights.image import files as image_files
from flotilla.shared.weights.image.files import sweep
from flotilla.shared.weights.image.image import WINDOW_BYTES, WeightImage
from flotilla.shared.weights.image.layout import ImageLayout
from flotilla.shared.weights.image.tensors import TORCH_DTYPES, open_image, safetensors_name, view_of


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}
    for name, dtype in TORCH_DTYPES.items():
        values = torch.randint(0, 2, (3, 5), generator=generator)
        made[f"layers.{name}"] = values.to(dtype)
    return made


@pytest.fixture
def image(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Iterator[WeightImage]:
    layout = ImageLayout.of({name: (tuple(each.shape), safetensors_name(each.dtype)) for name, each in tensors.items()})
    with WeightImage.create(layout.image_bytes, directory=tmp_path) as made:
        with made.writing() as view:
            view[: len(layout.header)] = layout.header
            for spec in layout.tensors:
                view_of(made.mapped, spec).copy_(tensors[spec.name])
        yield made


def test_an_image_is_what_the_safetensors_reader_reads(image: WeightImage, tensors: dict[str, torch.Tensor]) -> None:
    read = load_file(image.path)

    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    with safe_open(image.path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_an_opened_image_is_a_view_of_the_file(image: WeightImage, tensors: dict[str, torch.Tensor]) -> None:
    opened = open_image(image.path)

    assert all(torch.equal(opened[name], tensor) for name, tensor in tensors.items())
    spans = sorted((view.data_ptr(), view.nbytes) for view in opened.values() if view.nbytes)
    assert spans[-1][0] + spans[-1][1] - spans[0][0] == sum(tensor.nbytes for tensor in tensors.values())


def test_writing_to_an_opened_tensor_leaves_the_file_alone(image: WeightImage) -> None:
    before = image.checksum()

    open_image(image.path)["layers.F32"].fill_(9)

    assert image.checksum() == before


def test_a_manifest_describes_the_whole_file(image: WeightImage) -> None:
    manifest = image.manifest(version=4, slice_bytes=64)

    content = image.path.read_bytes()
    assert (manifest.version, manifest.slice_bytes, manifest.image_bytes) == (4, 64, len(content))
    assert manifest.checksum == xxhash.xxh3_64_hexdigest(content)
    assert manifest.tensors == image.layout().tensors


def test_flat_pieces_are_written_behind_the_header(tmp_path: Path) -> None:
    layout = ImageLayout.of({"a": ((2, 3), "F32"), "b": ((4,), "I16")})
    floats, integers = np.arange(6, dtype=np.float32), np.arange(4, dtype=np.int16)
    with WeightImage.create(layout.image_bytes, directory=tmp_path) as image:
        image.write_from(layout, [floats.data, integers.data])

        read = load_file(image.path)

    assert read["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert read["b"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("piece", [b"1234567", b"123456789"])
def test_pieces_that_do_not_fill_the_image_are_refused(tmp_path: Path, piece: bytes) -> None:
    layout = ImageLayout.of({"a": ((2,), "F32")})

    with WeightImage.create(layout.image_bytes, directory=tmp_path) as image, pytest.raises(ValueError, match="pieces"):
        image.write_from(layout, [piece])


def test_an_image_that_is_read_cannot_be_written(image: WeightImage) -> None:
    opened = open_image(image.path)

    with pytest.raises(Conflict, match="still being read"), image.writing():
        pass
    del opened
    with image.writing():
        pass


def test_an_image_that_is_written_cannot_be_read(image: WeightImage) -> None:
    with image.writing(), pytest.raises(WeightTransferFailed, match="being written"):
        open_image(image.path)
    assert open_image(image.path)


def test_a_tensor_outlives_its_image(image: WeightImage, tensors: dict[str, torch.Tensor]) -> None:
    opened = open_image(image.path)

    image.close()

    assert not image.path.exists()
    assert torch.equal(opened["layers.F32"], tensors["layers.F32"])
    with pytest.raises(ValueError, match="closed"):
        image.checksum()


def test_attaching_shares_the_bytes_and_leaves_the_file(image: WeightImage) -> None:
    with WeightImage.attach(image.path) as attached:
        attached.view[-1] ^= 255

        assert attached.checksum() == image.checksum()
    assert image.path.exists()


def test_there_is_nothing_to_attach_to_after_the_owner_closed(image: WeightImage) -> None:
    image.close()

    with pytest.raises(WeightTransferFailed, match="cannot open"):
        WeightImage.attach(image.path)


def test_a_file_cut_short_is_no_image(image: WeightImage) -> None:
    os.truncate(image.path, image.image_bytes - 1)

    with pytest.raises(WeightTransferFailed, match="by its header"):
        open_image(image.path)


def test_a_missing_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    free_bytes = psutil.disk_usage(str(tmp_path)).free

    with pytest.raises(WeightTransferFailed, match="no room for"):
        WeightImage.create(free_bytes * 2, directory=tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_pieces_are_written_whole_where_they_belong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, sizes = os.pwrite, iter([3, 4000, 1])
    monkeypatch.setattr(os, "pwrite", lambda file, data, position: write(file, data[: next(sizes, None)], position))
    with WeightImage.create(3 * 4096 + 5, directory=tmp_path, is_reserved=False) as image:
        image.write_at(4096, memoryview(b"b" * 4097))
        image.write_at(0, memoryview(b"a" * 4096))

        assert bytes(image.view) == b"a" * 4096 + b"b" * 4097 + bytes(4100)


def test_room_that_runs_out_while_pieces_are_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with WeightImage.create(100, directory=tmp_path, is_reserved=False) as image:
        monkeypatch.setattr(os, "pwrite", full)

        with pytest.raises(WeightTransferFailed, match="ran out of room for a weight image, at bytes 10 to 14"):
            image.write_at(10, memoryview(b"full"))


def test_images_go_to_the_temporary_directory_without_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_files, "SHARED_MEMORY", tmp_path / "missing")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    with WeightImage.create(8) as image:
        assert image.path.parent == tmp_path


def _dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""]) as process:
        process.wait()
    return process.pid


def test_sweeping_removes_what_dead_processes_left(tmp_path: Path, image: WeightImage) -> None:
    left = tmp_path / f"flotilla-weights-{_dead_pid()}-0a.safetensors"
    ours_before = tmp_path / f"flotilla-weights-{os.getpid()}-0b.safetensors"
    living = tmp_path / f"flotilla-weights-{os.getppid()}-0c.safetensors"
    foreign = tmp_path / "flotilla-weights-notes-0d.safetensors"
    for path in (left, ours_before, living, foreign):
        path.write_bytes(b"12345678")

    removed = sweep(tmp_path)

    assert sorted(removed) == sorted([left, ours_before])
    assert sorted(tmp_path.iterdir()) == sorted([image.path, living, foreign])


def test_sweeping_leaves_what_somebody_still_reads(tmp_path: Path) -> None:
    left = tmp_path / f"flotilla-weights-{_dead_pid()}-0a.safetensors"
    left.write_bytes(b"12345678")

    with WeightImage.attach(left):
        assert sweep(tmp_path) == []
    assert sweep(tmp_path) == [left]


def test_only_pages_that_are_there_are_written_by_the_mapping() -> None:
    with WeightImage.create(3 * 4096, is_reserved=False) as image:
        for position in (0, 4096):
            image.write_at(position, memoryview(bytes(4096)))
            assert image.present_at(0, 10) is None
        image.write_at(2 * 4096, memoryview(bytes(4096)))

        present = image.present_at(4090, 10)

        assert present is not None
        present[:] = b"0123456789"
        assert image.path.read_bytes()[4090:4100] == b"0123456789"


def test_on_a_disk_no_page_is_written_by_the_mapping(tmp_path: Path) -> None:
    with WeightImage.create(4096, directory=tmp_path) as image:
        assert image.present_at(0, 10) is None


def test_a_piece_that_is_there_ends_with_its_window() -> None:
    with WeightImage.create(WINDOW_BYTES + 100) as image:
        first, rest = image.present_at(WINDOW_BYTES - 10, 20), image.present_at(WINDOW_BYTES, 200)

        assert first is not None and rest is not None
        assert (len(first), len(rest)) == (10, 100)


def test_a_lent_image_holds_no_lock_until_its_owner_has_it_again() -> None:
    with WeightImage.create(64) as lent:
        lent.give_back()
        with WeightImage.attach(lent.path) as other:
            with other.writing():
                pass
            lent.own_again()
            with pytest.raises(Conflict), other.writing():
                pass
