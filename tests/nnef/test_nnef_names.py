"""Names for values, and names for files inside an archive."""

import pytest

from t2n_hf.nnef.names import RESERVED, Namer, identifier, is_identifier, member_problem


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("model.layers.0.weight", "model_layers_0_weight"),
        ("0.weight", "_0_weight"),
        ("", "_"),
        ("graph", "graph_"),
        ("größe", "gr_e"),
        ("a b\nc", "a_b_c"),
        ("true", "_true"),
        ("info", "_info"),
        ("false.scale", "_false_scale"),
    ],
    ids=["dots", "digit", "empty", "keyword", "accents", "spaces", "literal", "begins_with_inf", "begins_with_false"],
)
def test_any_text_becomes_an_identifier(text: str, name: str):
    assert identifier(text) == name
    assert is_identifier(name)


def test_no_keyword_is_an_identifier():
    assert not any(is_identifier(word) for word in RESERVED)


def test_unique_names_differ_and_are_the_same_each_time():
    def names() -> list[str]:
        namer = Namer(reserved=["S", "x_1"])
        return [namer.unique(base) for base in ("x", "x", "x", "S", "x.1", "x_2")]

    assert names() == ["x", "x_2", "x_3", "S_1", "x_1_1", "x_2_1"]
    assert len(set(names())) == 6


def test_a_reserved_name_is_not_given():
    namer = Namer()
    namer.reserve("y")
    assert namer.unique("y") == "y_1"


@pytest.mark.parametrize("name", ["graph.nnef", "a/b.c/d.dat", "model.layers.0.weight.dat", "ü.dat", "a b"])
def test_plain_relative_names_can_be_members(name: str):
    assert member_problem(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../x",
        "a//b",
        "./a",
        "a/.",
        "..",
        "a\\b",
        "C:x",
        "a\0b",
        "a\nb",
        "a\u202eb",
        "x" * 1025,
    ],
)
def test_names_that_leave_the_folder_or_hide_cannot_be_members(name: str):
    assert member_problem(name) is not None
