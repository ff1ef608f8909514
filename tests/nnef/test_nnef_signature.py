import io
import tarfile

import pytest

from t2n_hf.errors import ArchiveError, FormatError
from t2n_hf.nnef.signature import Signature, parse_signature, read_signature

TEXT = """version 1.0;
# graph network(no) -> (no)
fragment layer(a: tensor<scalar>) -> (b: tensor<scalar>)
{
    b = a;
}

graph network(
    input_ids, # token ids
    in_cache_key_0
) -> ( outputs, out_cache_key_0 )
{
    input_ids = tract_core_external(shape=[1, S], datum_type='i64');
}
"""
SIGNATURE = Signature(("input_ids", "in_cache_key_0"), ("outputs", "out_cache_key_0"))


def test_names_are_found_past_fragments_comments_and_line_breaks():
    assert parse_signature(TEXT) == SIGNATURE


def test_a_text_without_a_graph_is_refused():
    with pytest.raises(FormatError, match="declares no graph"):
        parse_signature("version 1.0;\n")


@pytest.mark.parametrize("mode", ["w", "w:gz"], ids=["tar", "tgz"])
def test_what_follows_the_graph_in_a_file_is_not_looked_at(tmp_path, mode):
    path = tmp_path / "model"
    with tarfile.open(path, mode) as tar:
        for name, content in (("first.dat", b"x" * 1000), ("graph.nnef", TEXT.encode()), ("last.dat", b"y" * 1000)):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    assert read_signature(path) == SIGNATURE


def test_a_folder_is_read(tmp_path):
    (tmp_path / "graph.nnef").write_text(TEXT)
    (tmp_path / "weight.dat").write_bytes(b"")
    assert read_signature(tmp_path) == SIGNATURE


def test_an_archive_without_a_graph_is_refused(tmp_path):
    (tmp_path / "weight.dat").write_bytes(b"")
    with pytest.raises(ArchiveError, match=r"holds no graph\.nnef"):
        read_signature(tmp_path)
