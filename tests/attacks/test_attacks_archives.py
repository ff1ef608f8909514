"""Archives that want to write elsewhere, or to fill the disk: refused, and nothing is left behind."""

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest

from t2n_hf.errors import ArchiveError
from t2n_hf.nnef.archive import ArchiveReader
from t2n_hf.nnef.dat import array_payload

GRAPH = b"version 1.0;\n"


def member(name: str, content: bytes = b"x", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def packed(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.GNU_FORMAT, end: bool = True) -> bytes:
    """Raw tar blocks: tarfile's own writer is too polite for some of these."""
    out = io.BytesIO()
    for info, content in (member("graph.nnef", GRAPH), *members):
        out.write(info.tobuf(form, "utf-8", "surrogateescape"))
        out.write(content + bytes(-len(content) % 512))
    return out.getvalue() + (bytes(1024) if end else b"")


def raw(name: bytes, size: int = 0, kind: bytes = b"0", content: bytes = b"") -> bytes:
    """One header with fields that TarInfo would not write, and its content."""
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108] = b"0000644\0"
    block[124:136] = f"{size:011o}\0".encode() if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    block[156:157] = kind
    block[257:265] = b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block) + content + bytes(-len(content) % 512)


def pax(records: bytes) -> bytes:
    return raw(b"pax", len(records), b"x", records)


ATTACKS = {
    "parent": (packed(member("../evil")), "has an empty, `.` or `..` part"),
    "parent inside": (packed(member("a/../../evil")), "`..` part"),
    "absolute": (packed(member("/tmp/t2n-hf-evil")), "absolute"),
    "drive": (packed(member("C:evil")), "absolute"),
    "backslash": (packed(member("..\\evil")), "backslash"),
    "parent folder": (packed(member("../d", b"", type=tarfile.DIRTYPE)), "folder '../d' is refused"),
    "symlink": (packed(member("w.dat", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")), "is a link"),
    "symlink then file": (
        packed(member("d", b"", type=tarfile.SYMTYPE, linkname="/tmp"), member("d/evil")),
        "is a link",
    ),
    "hardlink": (packed(member("w.dat", b"", type=tarfile.LNKTYPE, linkname="/etc/passwd")), "is a link"),
    "device": (packed(member("w.dat", b"", type=tarfile.CHRTYPE)), "device or special file"),
    "fifo": (packed(member("w.dat", b"", type=tarfile.FIFOTYPE)), "device or special file"),
    "sparse": (packed(member("w.dat", type=tarfile.GNUTYPE_SPARSE)), "device or special file"),
    "long link": (packed(member("w.dat", type=tarfile.GNUTYPE_LONGLINK)), "device or special file"),
    "twice": (packed(member("w.dat"), member("w.dat")), "is there twice"),
    "twice by dot": (packed(member("w.dat"), member("./w.dat")), "is there twice"),
    "file as folder": (packed(member("w"), member("w/x")), "is a file, and a folder for"),
    "one terabyte": (raw(b"w.dat", 1 << 40, content=b"x"), "claims 1099511627776 bytes"),
    "negative size": (raw(b"w.dat").replace(b"00000000000\0", b"\xff" * 12), "no tar archive|claims -1"),
    "more than there is": (raw(b"w.dat", 4_000_000_000, content=b"x"), "truncated|claim 4000000000"),
    "huge pax header": (raw(b"p", 1 << 40, b"x"), "extended header of 1099511627776 bytes"),
    "huge long name": (raw(b"L", 1 << 33, b"L"), "extended header of 8589934592 bytes"),
    "pax path": (pax(b"18 path=../../evil\n"[:18]) + raw(b"w.dat"), "extended header|refused"),
    "pax parent": (pax(b"17 path=../evil1\n") + raw(b"w.dat"), "'../evil1' is refused"),
    "pax size": (pax(b"22 size=1099511627776\n") + raw(b"w.dat"), "'size', which is not accepted"),
    "pax link": (pax(b"20 linkpath=/etc/pw\n") + raw(b"w.dat"), "'linkpath', which is not accepted"),
    "pax sparse": (pax(b"22 GNU.sparse.major=1\n") + raw(b"w.dat"), "GNU.sparse.major"),
    "pax length zero": (pax(b"0 path=a\n") + raw(b"w.dat"), "extended header"),
    "pax length negative": (pax(b"-4 path=a\n") + raw(b"w.dat"), "extended header"),
    "pax no number": (pax(b"x path=a\n") + raw(b"w.dat"), "damaged extended header"),
    "long name parent": (raw(b"L", 8, b"L", b"../evil\0") + raw(b"w.dat"), "'../evil' is refused"),
    "hidden control": (packed(member("a\x1bb")), "not printable"),
    "right to left": (packed(member("a\u202eb")), "not printable"),
    "checksum": (raw(b"w.dat").replace(b"0000644", b"0000777"), "no tar archive"),
    "no end": (packed(end=False), "no tar archive, or is truncated"),
    "garbage": (b"\xde\xad" * 600, "no tar archive"),
}


def refuse(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m").write_bytes(content)
    before = os.listdir(tmp_path)
    reader = ArchiveReader(tmp_path / "m")
    with pytest.raises(ArchiveError, match=message):
        reader.extract(tmp_path / "out")
    with pytest.raises(ArchiveError, match=message):
        reader.names()
    assert os.listdir(tmp_path) == before
    assert not (tmp_path.parent / "evil").exists()
    assert not Path("/tmp/t2n-hf-evil").exists()


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_tar_is_refused_and_leaves_nothing(tmp_path: Path, attack: str):
    refuse(tmp_path, *ATTACKS[attack])


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name != "garbage"])
def test_a_hostile_tgz_is_refused_and_leaves_nothing(tmp_path: Path, attack: str):
    content, message = ATTACKS[attack]
    refuse(tmp_path, gzip.compress(content), message)


def test_a_gzip_bomb_is_refused_before_it_is_inflated(tmp_path: Path):
    bomb = packed(member("w.dat", bytes(200 << 20)))
    refuse(tmp_path, gzip.compress(bomb, 9), "pass max_nbytes if you trust it")


def test_a_bomb_that_is_trusted_is_read(tmp_path: Path):
    (tmp_path / "m").write_bytes(gzip.compress(packed(member("w.dat", bytes(70 << 20))), 9))
    assert ArchiveReader(tmp_path / "m", max_nbytes=1 << 30).nbytes("w.dat") == 70 << 20


def test_a_graph_of_gigabytes_is_not_taken_into_memory(tmp_path: Path):
    with open(tmp_path / "m", "wb") as file:
        file.write(raw(b"graph.nnef", 1 << 30))
        file.truncate((1 << 30) + 2048)
    with pytest.raises(ArchiveError, match=r"graph\.nnef claims 1073741824 bytes"):
        ArchiveReader(tmp_path / "m").text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(packed()) + gzip.compress(packed(member("second"))), "after its first gzip member"),
        (gzip.compress(packed(member("w.dat", bytes(5000))))[:-9], "truncated"),
        (gzip.compress(packed())[:-8] + bytes(8), "damaged"),
        (b"\x1f\x8b\x08" + b"\xff" * 100, "damaged"),
        (b"", "no tar archive"),
        (b"\x80\x04\x95" + bytes(600), "no tar archive"),
    ],
    ids=["second member", "cut", "checksum", "noise", "empty", "pickle"],
)
def test_a_damaged_container_is_refused(tmp_path: Path, content: bytes, message: str):
    refuse(tmp_path, content, message)


def test_a_header_that_lies_about_its_size_is_refused(tmp_path: Path):
    import numpy as np

    content = b"".join(map(bytes, array_payload(np.ones(4, np.float32)).stream("w")))
    (tmp_path / "m").write_bytes(packed(member("w.dat", content[:-1])))
    with pytest.raises(ArchiveError, match="has 143 bytes, its header says 144"):
        ArchiveReader(tmp_path / "m").header("w")


def test_links_to_folders_and_special_files_in_a_folder_are_refused(tmp_path: Path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "graph.nnef").write_bytes(GRAPH)
    (tmp_path / "m" / "d").symlink_to("/etc")
    with pytest.raises(ArchiveError, match="'d' is refused: it is no plain file"):
        ArchiveReader(tmp_path / "m").names()
    (tmp_path / "m" / "d").unlink()
    os.mkfifo(tmp_path / "m" / "pipe")
    with pytest.raises(ArchiveError, match="'pipe' is refused"):
        ArchiveReader(tmp_path / "m").names()


def test_a_name_of_a_folder_archive_does_not_lead_out_of_it(tmp_path: Path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "graph.nnef").write_bytes(GRAPH)
    with pytest.raises(ArchiveError, match=r"holds no '\.\./secret'"):
        ArchiveReader(tmp_path / "m").read("../secret")
