"""Tags and short names find their class by metadata alone; what is broken or ambiguous is said with all names."""

import pytest
import torch

from t2n_hf.contract import InferenceTarget, SupportsOffloadState, Tag, WeightFormat
from t2n_hf.errors import ConfigError, TagClashError, UnknownTagError
from t2n_hf.nnef.dat import read_dat
from t2n_hf.registry import class_of_tag, format_class, installed_tags, list_plugins, resolve_offload_state
from t2n_hf.tensor import QTensorTractScaleOnly

GOOD = """
from t2n_hf.contract import WeightFormat

class Rows(WeightFormat):
    OFFLOAD_STATE_TAG = "{tag}"
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a distribution of one module and one entry point, for this test only."""

    def installed(distribution, tag, source, attribute="Rows"):
        folder = tmp_path / distribution
        module = distribution.replace("-", "_")
        metadata = folder / f"{module}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (folder / f"{module}.py").write_text(source.format(tag=tag))
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[t2n_hf.offload_state]\n{tag} = {module}:{attribute}\n")
        monkeypatch.syspath_prepend(str(folder))

    return installed


def test_a_class_is_found_by_tag_and_by_short_name():
    assert class_of_tag("t2n_hf.q4_0.v1") is QTensorTractScaleOnly
    assert format_class("q4_0") is QTensorTractScaleOnly


def test_a_declared_class_is_imported_when_it_is_used_and_not_before(install):
    install("first-format", "first_format.lazy.v1", GOOD)
    assert "first_format.lazy.v1" in installed_tags()
    assert "first_format.lazy.v1" not in {row.tag for row in list_plugins() if row.error}
    assert format_class("lazy").OFFLOAD_STATE_TAG == "first_format.lazy.v1"


def test_the_newest_version_of_a_format_is_taken(install):
    install("aging-format", "aging_format.aged.v2", GOOD)
    install("aging-format-ten", "aging_format.aged.v10", GOOD)
    assert format_class("aged").OFFLOAD_STATE_TAG == "aging_format.aged.v10"


def test_an_unknown_name_lists_what_is_installed_and_what_to_install():
    with pytest.raises(UnknownTagError, match=r"'q9_9'.*installed tags: .*t2n_hf\.q4_0\.v1.*pip install t2n-hf-q9_9"):
        format_class("q9_9")
    with pytest.raises(UnknownTagError, match=r"'some_dist\.q9\.v1'.*pip install some-dist"):
        class_of_tag("some_dist.q9.v1")


def test_one_tag_of_two_distributions_is_a_clash_that_names_both(install):
    install("claims-one", "claims.shared.v1", GOOD)
    install("claims-two", "claims.shared.v1", GOOD)
    with pytest.raises(TagClashError, match=r"claims-one 1\.0 .*claims-two 1\.0"):
        class_of_tag("claims.shared.v1")
    assert format_class("q4_0") is QTensorTractScaleOnly  # all others still work


def test_one_short_name_of_two_distributions_is_a_clash_that_names_both(install):
    install("left-format", "left_format.twin.v1", GOOD)
    install("right-format", "right_format.twin.v1", GOOD)
    with pytest.raises(TagClashError, match=r"left_format\.twin\.v1 and right_format\.twin\.v1"):
        format_class("twin")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import a_package_that_is_not_there\n", "ModuleNotFoundError"),
        ("Rows = 3\n", "is not a class with SupportsOffloadState"),
        (GOOD.replace("{tag}", "other.thing.v1"), "declares tag 'other.thing.v1'"),
    ],
    ids=["import fails", "no class", "another tag"],
)
def test_a_broken_plugin_is_skipped_with_a_warning_that_names_its_distribution(install, source, said):
    name = "broken-" + "".join(c for c in said.lower() if c.isalpha())[:12]
    tag = f"{name.replace('-', '_')}.bad.v1"
    install(name, tag, source)
    with (
        pytest.warns(UserWarning, match=f"{name} 1.0 is skipped: .*{said}"),
        pytest.raises(UnknownTagError, match=name),
    ):
        class_of_tag(tag)
    assert format_class("q4_0") is QTensorTractScaleOnly
    row = next(row for row in list_plugins() if row.tag == tag)
    assert said in row.error
    assert row.distribution == name


@pytest.mark.parametrize("state", [None, 3, {}, {"tag": 3}, {"tag": "t2n_hf.q4_0.v1"}, torch.ones(2)], ids=str)
def test_what_is_no_offload_state_resolves_to_nothing(state):
    assert resolve_offload_state(state) is None


def test_a_state_resolves_to_its_class_and_an_unknown_tag_is_an_error():
    packed = QTensorTractScaleOnly.quantize(torch.randn(2, 32))
    assert resolve_offload_state(packed.to_offload_state()) is QTensorTractScaleOnly
    with pytest.raises(UnknownTagError, match="nobody"):
        resolve_offload_state({"tag": "nobody.has.v1", "tensors": {}, "meta": {}})


@pytest.mark.parametrize("text", ["", "q4_0", "a.b", "a.b.1", "a.b.v", "a b.c.v1", "a.b.c.v1"])
def test_a_tag_has_one_form(text):
    with pytest.raises(ConfigError, match="not a tag"):
        Tag.parse(text)


def test_two_classes_of_one_process_cannot_share_a_tag():
    class First(SupportsOffloadState):
        OFFLOAD_STATE_TAG = "in_process.first.v1"

    with pytest.raises(TagClashError, match=r"First.*Second"):

        class Second(SupportsOffloadState):
            OFFLOAD_STATE_TAG = "in_process.first.v1"

    assert class_of_tag("in_process.first.v1") is First
    with pytest.raises(ConfigError, match="stored form"):
        format_class("in_process.first.v1")


def test_a_class_without_a_block_format_writes_its_dense_values(tmp_path):
    class Plain(WeightFormat):
        OFFLOAD_STATE_TAG = "in_process.plain.v1"

        def __init__(self, values):
            self.values = values

        @classmethod
        def from_offload_state(cls, state, target_device=None):
            return cls(state["tensors"]["values"])

        def to(self, dtype):
            return type(self)(self.values.to(dtype))

        def to_base_tensor(self):
            return self.values

    values = torch.randn(3, 5)
    state = {"tag": Plain.OFFLOAD_STATE_TAG, "tensors": {"values": values}, "meta": {}}
    Plain.write_offload_state_in_file(state, tmp_path, "w")
    assert torch.equal(torch.from_numpy(read_dat(tmp_path / "w.dat")), values)
    Plain.write_offload_state_in_file(state, tmp_path, "half", InferenceTarget(dtype="f16"))
    assert torch.equal(torch.from_numpy(read_dat(tmp_path / "half.dat")), values.half())
