"""Archives, written and read in all three forms, with tarfile and gzip as independent truth."""

import contextlib
import getpass
import gzip
import hashlib
import io
import os
import re
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from light_process import light_command

from t2n_hf.errors import ArchiveError, ConfigError, FormatError, OutputExistsError
from t2n_hf.nnef.archive import ArchiveReader, ArchiveWriter
from t2n_hf.nnef.dat import array_payload, dense_payload, read_dat

FORMATS = ["tgz", "tar", "dir"]
WEIGHTS = {
    "model.w": np.random.default_rng(0).normal(size=(300, 300)).astype(np.float32),
    "model.b": np.arange(7, dtype=np.int64),
    "sub/" + "long." * 40 + "name": np.ones((2, 2), np.float16),
    "nothing": np.ones((0,), np.float32),
}
GRAPH = "version 1.0;\n# ü\n"


def write(path: Path, form: str = "tgz", level: int = 0) -> ArchiveWriter:
    with ArchiveWriter(path, form, level=level) as writer:
        writer.add_text("graph.nnef", GRAPH)
        for label, values in WEIGHTS.items():
            writer.add_dat(label, array_payload(values))
    return writer


@pytest.mark.parametrize(("form", "level"), [("tgz", 0), ("tgz", 6), ("tar", 0), ("dir", 0)])
def test_what_is_written_is_read_back(tmp_path: Path, form: str, level: int):
    write(tmp_path / "m", form, level)
    reader = ArchiveReader(tmp_path / "m")
    assert set(reader.names()) == {"graph.nnef", *(f"{label}.dat" for label in WEIGHTS)}
    assert set(reader.labels()) == set(WEIGHTS)
    assert reader.text() == GRAPH
    for label, values in WEIGHTS.items():
        assert reader.header(label).shape == values.shape
        assert reader.read(f"{label}.dat")[128:] == values.tobytes()
        assert reader.nbytes(f"{label}.dat") == 128 + values.nbytes
    reader.extract(tmp_path / "out")
    for label, values in WEIGHTS.items():
        assert np.array_equal(read_dat(tmp_path / "out" / f"{label}.dat"), values)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize(("form", "level"), [("tgz", 0), ("tgz", 6), ("tar", 0)])
def test_tarfile_reads_what_was_written(tmp_path: Path, form: str, level: int):
    write(tmp_path / "m", form, level)
    with tarfile.open(tmp_path / "m") as archive:
        members = {member.name: archive.extractfile(member).read() for member in archive if member.isreg()}
    assert members["graph.nnef"] == GRAPH.encode()
    assert members["model.w.dat"][128:] == WEIGHTS["model.w"].tobytes()
    assert len(members) == 1 + len(WEIGHTS)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize(
    "form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["ustar", "gnu", "pax"]
)
def test_archives_of_other_makers_are_read(tmp_path: Path, mode: str, form: int):
    folder = tmp_path / "src"
    write(folder, "dir")
    os.utime(folder / "graph.nnef", (1.5, 1.5))  # a fraction of a second makes a pax header
    long_name = "x" * (80 if form == tarfile.USTAR_FORMAT else 180)
    (folder / long_name).write_bytes(b"12")
    with tarfile.open(tmp_path / "m", mode, format=form) as archive:
        for name in sorted(os.listdir(folder)):
            if name != "sub":
                archive.add(folder / name, arcname=f"./{name}")
    reader = ArchiveReader(tmp_path / "m")
    assert set(reader.names()) == {name for name in os.listdir(folder) if name != "sub"}
    assert reader.read(long_name) == b"12"


@pytest.mark.parametrize(("form", "level"), [("tgz", 0), ("tgz", 6), ("tar", 0)])
def test_the_same_model_gives_the_same_bytes_anywhere_and_says_nothing_of_its_maker(
    tmp_path: Path, form: str, level: int
):
    one, two = tmp_path / "one" / "m", tmp_path / "two" / "other-name"
    one.parent.mkdir()
    two.parent.mkdir()
    write(one, form, level)
    previous = os.umask(0o077)
    try:
        write(two, form, level)
    finally:
        os.umask(previous)
    content = one.read_bytes()
    assert content == two.read_bytes()
    raw = gzip.decompress(content) if form == "tgz" else content
    for trace in (socket.gethostname(), getpass.getuser(), str(tmp_path), "other-name", sys.executable):
        if len(trace) > 3:
            assert trace.encode() not in content
            assert trace.encode() not in raw
    with tarfile.open(one) as archive:
        for member in archive:
            assert (member.mtime, member.uid, member.gid, member.uname, member.gname) == (0, 0, 0, "", "")
            assert member.mode == 0o644


def test_how_values_are_cut_into_chunks_does_not_show(tmp_path: Path):
    content = np.random.default_rng(0).bytes(1 << 18)
    for name, step in (("a", 1 << 18), ("b", 1000), ("c", 65535)):
        with ArchiveWriter(tmp_path / name) as writer:
            chunks = [content[i : i + step] for i in range(0, len(content), step)]
            writer.add_dat("w", dense_payload((1 << 18,), "u8", lambda chunks=chunks: chunks))
    assert len({(tmp_path / name).read_bytes() for name in "abc"}) == 1


@pytest.mark.parametrize("form", FORMATS)
def test_the_writer_reports_sha256_and_size_of_its_files(tmp_path: Path, form: str):
    files = write(tmp_path / "m", form).files
    expected = {}
    for path in [tmp_path / "m"] if form != "dir" else sorted((tmp_path / "m").rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            expected[path.relative_to(tmp_path).as_posix()] = (hashlib.sha256(content).hexdigest(), len(content))
    assert files == expected


def interrupt(writer: ArchiveWriter) -> None:
    writer.add_text("graph.nnef", "new")
    raise KeyboardInterrupt


@pytest.mark.parametrize("form", FORMATS)
def test_an_interrupted_writer_leaves_the_older_archive_and_nothing_else(tmp_path: Path, form: str):
    write(tmp_path / "m", form)
    before = ArchiveReader(tmp_path / "m").read("model.w.dat")
    with pytest.raises(KeyboardInterrupt), ArchiveWriter(tmp_path / "m", form) as writer:
        interrupt(writer)
    assert os.listdir(tmp_path) == ["m"]
    assert ArchiveReader(tmp_path / "m").read("model.w.dat") == before


@pytest.mark.parametrize("form", FORMATS)
def test_a_failed_first_write_leaves_nothing(tmp_path: Path, form: str):
    def chunks():
        yield bytes(100)
        raise RuntimeError("the weight's owner failed")

    with pytest.raises(RuntimeError), ArchiveWriter(tmp_path / "m", form, level=0) as writer:
        writer.add_dat("w", dense_payload((1000,), "u8", chunks))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("form", FORMATS)
def test_an_older_archive_is_replaced(tmp_path: Path, form: str):
    write(tmp_path / "m", form)
    with ArchiveWriter(tmp_path / "m", form) as writer:
        writer.add_text("graph.nnef", "new")
    assert ArchiveReader(tmp_path / "m").names() == ("graph.nnef",)
    assert os.listdir(tmp_path) == ["m"]


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "thesis.tex").write_text("years of work")
    with pytest.raises(OutputExistsError, match=r"holds no graph\.nnef"):
        write(tmp_path / "m", "dir")
    assert (tmp_path / "m" / "thesis.tex").read_text() == "years of work"


def test_a_member_that_failed_cannot_be_forgotten(tmp_path: Path):
    with (
        pytest.raises(ArchiveError, match=r"'w\.dat' was not written to its end"),
        ArchiveWriter(tmp_path / "m") as writer,
        contextlib.suppress(FormatError),
    ):
        writer.add_dat("w", dense_payload((2,), "f32", lambda: [b"short"]))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("given", [3, 5], ids=["short", "long"])
def test_a_member_of_another_size_than_announced_is_refused(tmp_path: Path, given: int):
    with pytest.raises(FormatError, match=r"'x' gave .* 4 were announced"), ArchiveWriter(tmp_path / "m") as writer:
        writer.add("x", 4, [bytes(given)])


def test_a_name_is_added_once_and_stays_inside(tmp_path: Path):
    with ArchiveWriter(tmp_path / "m") as writer:
        writer.add_text("x", "1")
        with pytest.raises(ArchiveError, match="there already"):
            writer.add_text("x", "2")
        with pytest.raises(ArchiveError, match="refused"):
            writer.add_text("../x", "2")
    assert ArchiveReader(tmp_path / "m").names() == ("x",)
    with pytest.raises(ArchiveError, match="not open"):
        writer.add_text("y", "3")


@pytest.mark.parametrize(
    "options", [{"format": "zip"}, {"format": "tar", "level": 1}, {"level": 10}, {"level": -1}], ids=str
)
def test_unknown_options_are_refused(tmp_path: Path, options: dict):
    with pytest.raises(ConfigError, match="expected"):
        ArchiveWriter(tmp_path / "m", **options)


def test_a_tensor_of_four_gib_is_refused_by_name_before_its_values_are_asked_for(tmp_path: Path):
    payload = dense_payload((1 << 30,), "f32", lambda: pytest.fail("values were asked for"))
    with (
        pytest.raises(FormatError, match=r"'model\.huge' takes 4294967296 bytes"),
        ArchiveWriter(tmp_path / "m") as writer,
    ):
        writer.add_dat("model.huge", payload)
    assert os.listdir(tmp_path) == []


def test_two_writers_of_one_target_are_told_apart(tmp_path: Path):
    with ArchiveWriter(tmp_path / "m") as first:
        with pytest.raises(OSError, match="another process is writing"), ArchiveWriter(tmp_path / "m"):
            pass
        first.add_text("x", "1")
    assert ArchiveReader(tmp_path / "m").read("x") == b"1"


@pytest.mark.parametrize("name", ["missing.dat", "graph.nnef"])
def test_a_member_that_is_not_there_is_an_error(tmp_path: Path, name: str):
    with ArchiveWriter(tmp_path / "m") as writer:
        writer.add_text("x", "1")
    with pytest.raises(ArchiveError, match=f"holds no {re.escape(repr(name))}"):
        ArchiveReader(tmp_path / "m").read(name)


def test_a_path_that_is_nothing_is_an_error(tmp_path: Path):
    with pytest.raises(ArchiveError, match="neither a folder nor a file"):
        ArchiveReader(tmp_path / "m")


def test_extract_does_not_touch_a_folder_that_exists(tmp_path: Path):
    write(tmp_path / "m")
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputExistsError):
        ArchiveReader(tmp_path / "m").extract(tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


def test_a_folder_of_links_to_files_is_read_as_the_hub_cache_makes_them(tmp_path: Path):
    write(tmp_path / "blobs", "dir")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "graph.nnef").symlink_to(tmp_path / "blobs" / "graph.nnef")
    assert ArchiveReader(tmp_path / "snapshot").text() == GRAPH


_RSS = """
import resource, sys
import numpy as np
from t2n_hf.nnef.archive import ArchiveWriter
from t2n_hf.nnef.dat import dense_payload
CHUNK = 8 << 20
buffer = memoryview(np.ones(CHUNK, np.uint8))
def write(path, chunks):
    with ArchiveWriter(path, sys.argv[2]) as writer:
        writer.add_dat("w", dense_payload((chunks, CHUNK), "u8", lambda: (buffer for _ in range(chunks))))
write(sys.argv[1], 1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write(sys.argv[1], 8)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / CHUNK)
"""


@pytest.mark.parametrize("form", ["tgz", "tar"])
def test_writing_a_64_mib_weight_holds_less_than_two_chunks(tmp_path: Path, form: str):
    command = light_command(_RSS, tmp_path / "m", form)
    chunks = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert chunks < 2


def test_a_tar_stream_in_memory_starts_with_the_graph(tmp_path: Path):
    write(tmp_path / "m", "tar")
    with tarfile.open(fileobj=io.BytesIO((tmp_path / "m").read_bytes())) as archive:
        assert archive.getnames()[0] == "graph.nnef"
