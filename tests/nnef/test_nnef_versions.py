"""Versions of tract: what a document needs, and how a target is said."""

import pytest

from t2n_hf.errors import ConfigError
from t2n_hf.nnef.ir import Assign, Dim, Document, External, Fragment, Name
from t2n_hf.nnef.versions import least_version, needs_of, parse_target, since, version_key


def document(*body: Assign, fragments: tuple[Fragment, ...] = ()) -> Document:
    return Document(inputs=(External("x", "f32", (2,)),), outputs=("y",), variables=(), body=body, fragments=fragments)


def box(**options: object) -> Assign:
    return Assign(("y",), "box", (Name("x"),), {"border": "constant", "normalize": True, **options})


CUMSUM = Assign(("y",), "tract_core_cumsum", (Name("x"),), {"axis": 0})


def test_versions_compare_by_their_numbers():
    assert version_key("0.23.10") > version_key("0.23.9")


def test_a_document_of_old_operators_needs_the_least():
    assert least_version(document(Assign(("y",), "relu", (Name("x"),), {}))) == "0.23.0"


def test_the_newest_operator_decides_in_fragments_too():
    fragment = Fragment("layer", ("x",), ("y",), (CUMSUM,))
    call = Assign(("y",), "layer", (Name("x"),), {})
    assert least_version(document(call, fragments=(fragment,))) == since("tract_core_cumsum") == "0.23.9"


@pytest.mark.parametrize(
    ("options", "version"),
    [
        ({"padding": [(0, 0), (1, 1)]}, "0.23.6"),
        ({"padding": [(0, 0), (0, 0)]}, "0.23.0"),
        ({"padding": [(0, 0), (1, 1)], "border": "ignore"}, "0.23.0"),
    ],
    ids=["padding that counts", "no padding", "padding that does not count"],
)
def test_a_mean_needs_a_later_version_where_padding_counts(options, version):
    assert least_version(document(box(**options))) == version


@pytest.mark.parametrize(("length", "version"), [(Dim("S"), "0.23.9"), (4, "0.23.0")], ids=["free", "fixed"])
def test_a_join_with_a_number_needs_a_later_version_at_free_lengths(length, version):
    zeros = Assign(("zeros",), "tract_core_broadcast", (0.0,), {"shape": [2, length]})
    wide = Assign(("wide",), "unsqueeze", (Name("zeros"),), {"axes": [2]})
    join = Assign(("y",), "concat", ([Name("x"), Name("wide")],), {"axis": 1})
    assert least_version(document(zeros, wide, join)) == version


@pytest.mark.parametrize(("length", "version"), [(Dim("S"), "0.23.5"), (4, "0.23.0")], ids=["free", "fixed"])
@pytest.mark.parametrize("operator", ["transpose", "matmul"])
def test_axes_moved_around_a_number_need_a_later_version_at_free_lengths(length, version, operator):
    zeros = Assign(("zeros",), "tract_core_broadcast", (0.0,), {"shape": [2, length]})
    moved = Assign(("y",), operator, (Name("zeros"),), {"axes": [1, 0]})
    assert least_version(document(zeros, moved)) == version


def test_what_is_needed_is_listed_once():
    assert [need.version for need in needs_of(document(CUMSUM, CUMSUM))] == ["0.23.9"]


def test_a_target_is_the_version_in_it():
    assert parse_target("tract==0.23.5") == parse_target(" tract == 0.23.5 ") == "0.23.5"


@pytest.mark.parametrize("target", ["0.23.5", "tract>=0.23.5", "tract==0.23", "onnx==1.0.0", "tract==0.22.4"])
def test_another_form_or_a_version_that_is_too_old_is_refused_with_what_is_expected(target):
    with pytest.raises(ConfigError, match=r"0\.23\.0"):
        parse_target(target)
