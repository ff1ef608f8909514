import pytest
import typer

from t2n_hf.cli.options import parse_bytes, parse_device_map, parse_max_memory, placement_options, progress_bar


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1000", 1000), ("2GB", 2_000_000_000), ("500MiB", 500 << 20), ("1.5 gib", 3 << 29), ("10 kb", 10_000), ("7B", 7)],
    ids=str,
)
def test_a_size_is_read_with_its_unit(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "lots", "-1GB", "2 elephants", "1,5GB"], ids=repr)
def test_something_else_is_no_size(text):
    with pytest.raises(typer.BadParameter, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "device_map"),
    [
        (None, None),
        ("disk", {"": "disk"}),
        ("cpu", {"": "cpu"}),
        ("auto", "auto"),
        ('{"model": "disk", "lm_head": 0}', {"model": "disk", "lm_head": 0}),
    ],
    ids=str,
)
def test_a_device_map_is_a_word_or_json(text, device_map):
    assert parse_device_map(text) == device_map


@pytest.mark.parametrize("text", ["{", '{"a": [1]}', "{'a': 'cpu'}"], ids=str)
def test_a_broken_device_map_is_refused(text):
    with pytest.raises(typer.BadParameter, match="device map"):
        parse_device_map(text)


def test_memory_limits_are_given_by_device():
    assert parse_max_memory(["cpu=2GB", "0=1GiB"]) == {"cpu": 2_000_000_000, 0: 1 << 30}
    assert parse_max_memory([]) is None
    assert parse_max_memory(None) is None


@pytest.mark.parametrize("text", ["cpu", "=2GB", "cpu=lots"], ids=str)
def test_a_broken_memory_limit_is_refused(text):
    with pytest.raises(typer.BadParameter):
        parse_max_memory([text])


def test_memory_limits_go_with_any_map():
    for text, device_map in (("auto", "auto"), ("disk", {"": "disk"}), ('{"": "cpu"}', {"": "cpu"}), (None, None)):
        expected = {"device_map": device_map, "max_memory": {"cpu": 1_000_000}}
        assert placement_options(text, ["cpu=1MB"]) == expected
    assert placement_options("disk", None) == {"device_map": {"": "disk"}, "max_memory": None}


def test_there_is_no_progress_bar_without_a_terminal():
    assert progress_bar() is False
