import pytest
import torch
from torch import nn
from torch.export import Dim

from t2n_hf.errors import ConfigError
from t2n_hf.trace.flat import dim_name, flatten_interface
from t2n_hf.trace.interface import Interface

S = Dim("S", min=1)
X, PAIR = torch.zeros(3, 4), {"a": torch.zeros(3, 4), "b": torch.zeros(1, 4)}


class Named(nn.Module):
    def forward(self, x, factor, *, pair):
        return (x * factor + pair["a"] + pair["b"],)


def interface(dynamic_shapes, names=("x", "a", "b"), **options):
    module = Named()
    return Interface(
        module=module,
        args=(X, 2),
        kwargs={"pair": PAIR},
        dynamic_shapes=dynamic_shapes,
        input_names=names,
        output_names=("y",),
        weight_owner=module,
        **options,
    )


@pytest.mark.parametrize(
    "shapes",
    [
        ({0: S}, None, {"a": {0: S}, "b": None}),
        {"x": {0: S}, "pair": {"a": {0: S}, "b": None}},
        [(S, None), None, {"a": (S, None)}],
        {"x": [S, None], "pair": [(S, None), (None, None)]},
    ],
    ids=["in order", "by name", "sequences of lengths", "a list for a mapping"],
)
def test_every_form_of_dynamic_shapes_gives_the_lengths_of_each_tensor(shapes):
    flat = flatten_interface(interface(shapes), torch.float32)
    assert flat.dims == [{0: S}, {0: S}, {}]
    assert [tuple(x.shape) for x in flat.tensors] == [(3, 4), (3, 4), (1, 4)]


def test_without_dynamic_shapes_all_lengths_are_fixed():
    assert flatten_interface(interface(None), torch.float32).dims == [{}, {}, {}]


def test_numbers_among_the_arguments_are_put_back_in_their_places():
    flat = flatten_interface(interface(None), torch.float32)
    (result,) = flat.module([torch.ones(3, 4), torch.ones(3, 4), torch.ones(1, 4)])
    assert torch.equal(result, torch.full((3, 4), 4.0))


def test_floating_examples_take_the_dtype_of_the_export_and_others_keep_theirs():
    module = nn.Identity()
    face = Interface(
        module=module,
        args=(torch.zeros(2, dtype=torch.float64),),
        input_names=("x",),
        output_names=("y",),
        weight_owner=module,
    )
    assert flatten_interface(face, torch.float16).tensors[0].dtype is torch.float16


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ((None, None), "2 entries for 3 arguments"),
        ({"y": None}, "names y; the example has x, factor, pair"),
        ((None, None, [None]), "1 entries where dict has 2"),
    ],
    ids=["too few", "unknown name", "another structure"],
)
def test_dynamic_shapes_that_do_not_follow_the_arguments_are_refused(shapes, message):
    with pytest.raises(ConfigError, match=message):
        flatten_interface(interface(shapes), torch.float32)


def test_names_and_tensors_must_match_in_number():
    with pytest.raises(ConfigError, match="3 tensors, input_names has 2"):
        flatten_interface(interface(None, names=("x", "a")), torch.float32)


def test_only_named_dims_have_names():
    assert dim_name(S) == "S"
    assert dim_name(Dim.AUTO) is None
    assert dim_name(7) is None


def test_one_name_cannot_mean_an_input_and_an_output():
    with pytest.raises(ConfigError, match="repeated: y"):
        interface(None, names=("x", "a", "y"))


def test_the_prefix_must_lead_to_the_owner_of_the_weights():
    module = nn.Sequential(nn.Linear(2, 2))
    options = {"module": module, "args": (X,), "input_names": ("x",), "output_names": ("y",)}
    Interface(**options, weight_owner=module[0], prefix="0")
    with pytest.raises(ConfigError, match="is not its weight_owner"):
        Interface(**options, weight_owner=module, prefix="0")
    with pytest.raises(ConfigError, match="give the prefix"):
        Interface(**options, weight_owner=module[0])


@pytest.mark.parametrize(("dtype", "wanted"), [(torch.float16, torch.float32), (torch.float64, torch.float64)])
def test_precise_inputs_have_no_less_than_f32(dtype, wanted):
    flat = flatten_interface(interface(None, precise=frozenset({"a"})), dtype)
    assert [x.dtype for x in flat.tensors] == [dtype, wanted, dtype]
