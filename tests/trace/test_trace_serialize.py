import inspect

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import CausalLMOutputWithPast

from t2n_hf import trace
from t2n_hf.errors import ConfigError, FormatError
from t2n_hf.trace import (
    choose_kwargs_for_dynamic_shapes,
    deserialize_args,
    deserialize_args_kwargs,
    extract_names_from_schema,
    make_copy,
    serialize_args,
    serialize_one,
    type_as_str_with_info,
)

X, Y, Z = torch.randn(2, 3), torch.arange(4), torch.ones(1, dtype=torch.bool)
OBJECTS = {
    "tensor": X,
    "None": None,
    "bool": True,
    "int": 3,
    "float": float("inf"),
    "text": "sdpa",
    "dtype": torch.float16,
    "list": [X, Y],
    "tuple": (X, Y, Z),
    "dict": {"b": X, "a": Y},
    "nested": [X, (None, {"deep": [Y, 2, False, 1.5]}), [], ()],
    "output": CausalLMOutputWithPast(logits=X, hidden_states=(Y, Z)),
}


def assert_same(got, want):
    leaves, spec = pytree.tree_flatten(want)
    others, other_spec = pytree.tree_flatten(got)
    assert other_spec == spec
    for mine, other in zip(leaves, others, strict=True):
        assert type(mine) is type(other)
        assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other


def test_names_and_parameters_are_those_of_the_reference():
    parameters = {
        "choose_kwargs_for_dynamic_shapes": ["ds_args", "ds_kwargs", "forward_names"],
        "deserialize_args": ["res", "expected_types", "clone", "return_n_args"],
        "deserialize_args_kwargs": ["args", "kwargs", "expected_types", "clone", "ordered_names", "fill_kwargs"],
        "extract_names_from_schema": ["schema"],
        "make_copy": ["obj"],
        "serialize_args": ["args", "kwargs", "schema", "args_names"],
        "serialize_one": ["obj", "name", "schema"],
        "tree_spec_as_name": ["tree_spec", "n_elements"],
        "tree_spec_from_name": ["name"],
        "type_as_str_with_info": ["obj"],
    }
    assert {name: list(inspect.signature(getattr(trace, name)).parameters) for name in parameters} == parameters


@pytest.mark.parametrize("clone", [False, True], ids=["shared", "cloned"])
@pytest.mark.parametrize("name", OBJECTS)
def test_an_argument_comes_back_as_it_was(name, clone):
    args = (Z, OBJECTS[name], Y)
    leaves, named = serialize_args(args, None, schema="")
    assert named == {}
    assert not any(isinstance(leaf, list | tuple | dict) for leaf in leaves)
    back = deserialize_args(leaves, [type_as_str_with_info(arg) for arg in args], clone=clone)
    assert_same(back, args)
    assert (back[0] is Z) is not clone


def test_a_call_with_all_objects_at_once_comes_back():
    args = tuple(OBJECTS.values())
    leaves, _ = serialize_args(args, {}, schema="")
    assert_same(deserialize_args(leaves, [type_as_str_with_info(arg) for arg in args]), args)


def test_leaves_of_a_container_may_come_as_a_list_of_their_own():
    args = ([X, Y], Z, {"k": [X, None]})
    groups = [serialize_one(arg, place, "") for place, arg in enumerate(args)]
    assert [type(group) for group in groups] == [list, torch.Tensor, list]
    assert_same(deserialize_args(groups, [type_as_str_with_info(arg) for arg in args]), args)


def test_a_tensor_alone_is_one_argument():
    assert serialize_args(X, None, "") == ((X,), {})
    assert deserialize_args(X, ["Tensor"]) == (X,)


def test_the_number_of_items_used_is_returned_when_asked_for():
    types = ["Tensor", type_as_str_with_info([X, Y])]
    values, used = deserialize_args([X, X, Y, Z], types, return_n_args=True)
    assert (len(values), used) == (2, 3)
    assert deserialize_args([X, [X, Y], Z], types, return_n_args=True)[1] == 2
    with pytest.raises(FormatError, match=r"4 leaves for arguments of types .* which take 3"):
        deserialize_args([X, X, Y, Z], types)


NAMES = ["x", "cache", "mask", "flag", "rest"]


def test_named_arguments_go_in_the_order_of_the_parameters():
    kwargs = {"flag": True, "cache": [Y, Z]}
    leaves, named = serialize_args((X,), kwargs, "", args_names=NAMES)
    assert named == {}
    assert [leaf if isinstance(leaf, bool) or leaf is None else tuple(leaf.shape) for leaf in leaves] == [
        (2, 3),
        (4,),
        (1,),
        None,
        True,
        None,
    ]
    by_name = {name: type_as_str_with_info(value) for name, value in kwargs.items()}
    args, back = deserialize_args_kwargs(leaves, {}, (["Tensor"], by_name), ordered_names=NAMES)
    assert_same((args, back), ((X,), {"cache": [Y, Z], "flag": True}))


def test_names_come_from_the_schema_when_they_are_not_given():
    leaves, _ = serialize_args((X,), {"b": Y, "a": Z}, "(Tensor x, Tensor a, Tensor b) -> Tensor")
    assert all(a is b for a, b in zip(leaves, (X, Z, Y), strict=True))


def test_types_of_named_arguments_may_be_in_the_order_of_their_names():
    leaves, _ = serialize_args((X, [Y]), {"mask": Z, "flag": None}, "", args_names=["x", "cache", "mask", "flag"])
    types = (["Tensor", type_as_str_with_info([Y])], ["Tensor", "None"])
    args, kwargs = deserialize_args_kwargs(leaves, {}, types, ordered_names=["x", "cache", "mask", "flag"])
    assert_same((args, kwargs), ((X, [Y]), {"mask": Z, "flag": None}))


def test_arguments_that_are_no_parameters_follow_and_come_back():
    kwargs = {"mask": Z, "extra": [X, 1]}
    leaves, _ = serialize_args((X,), kwargs, "", args_names=["x", "mask"])
    by_name = {name: type_as_str_with_info(value) for name, value in kwargs.items()}
    _, back = deserialize_args_kwargs(leaves, {}, (["Tensor"], by_name), ordered_names=["x", "mask"])
    assert_same(back, kwargs)


def test_the_last_name_may_be_that_of_all_other_keywords_and_gets_nothing():
    leaves, _ = serialize_args((X,), {"mask": Z}, "", args_names=["x", "mask", "kwargs"])
    types = (["Tensor"], {"mask": "Tensor"})
    names = ["x", "mask", "kwargs"]
    args, kwargs = deserialize_args_kwargs(leaves, {}, types, ordered_names=names, fill_kwargs=True)
    assert_same((args, kwargs), ((X,), {"mask": Z}))
    filled = (["Tensor"], {"mask": "Tensor", "kwargs": "Tensor"})
    with pytest.raises(FormatError, match="types of kwargs"):
        deserialize_args_kwargs([X, Z, Y], {}, filled, ordered_names=names, fill_kwargs=True)
    with pytest.raises(FormatError, match=r"1 of 3 leaves are left over"):
        deserialize_args_kwargs([X, Z, Y], {}, types, ordered_names=names, fill_kwargs=True)
    with pytest.raises(FormatError, match="needs ordered_names"):
        deserialize_args_kwargs([X], {}, (["Tensor"], {}), fill_kwargs=True)


def test_named_arguments_are_cloned_too():
    leaves, _ = serialize_args((X,), {"mask": Z}, "", args_names=["x", "mask"])
    types = (["Tensor"], {"mask": "Tensor"})
    args, kwargs = deserialize_args_kwargs(leaves, {}, types, clone=True, ordered_names=["x", "mask"])
    assert_same((args, kwargs), ((X,), {"mask": Z}))
    assert args[0] is not X
    assert kwargs["mask"] is not Z


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: deserialize_args([1], ["Tensor"]), FormatError, "argument 0 of 1 is Tensor, found a int"),
        (lambda: deserialize_args([True], ["int"]), FormatError, "is int, found a bool"),
        (lambda: deserialize_args([], ["Tensor"]), FormatError, "found nothing"),
        (lambda: deserialize_args([X], ["Cache"]), FormatError, "of type 'Cache'; expected a structure or one of"),
        (lambda: deserialize_args([X], [type_as_str_with_info([X, X])]), FormatError, "2 leaves, found 1"),
        (lambda: deserialize_args_kwargs([X], {"y": X}, ([], [])), FormatError, "arguments by name: y"),
        (lambda: deserialize_args_kwargs([X], {}, ([], ["Tensor"])), FormatError, "1 types of named arguments"),
        (lambda: deserialize_args_kwargs([X], {}, ([], {"y": "Tensor"})), FormatError, "types of y"),
        (lambda: serialize_one(nn.ReLU(), "act", "(x)"), ConfigError, r"'act' of \(x\) holds .*ReLU"),
        (lambda: serialize_one([X, {1, 2}], 0, ""), ConfigError, "argument 0 holds builtins.set"),
        (lambda: type_as_str_with_info(nn.ReLU()), ConfigError, "not a pytree and no leaf"),
        (lambda: serialize_args((X,), {"y": X}, ""), ConfigError, "need args_names"),
        (lambda: serialize_args((X,), {"x": X}, "", ["x"]), ConfigError, "x are given by position and by name"),
    ],
)
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ("(Tensor x, Tensor y) -> Tensor", ["x", "y"]),
        ("() -> ()", []),
        (
            'ns::op.out(Tensor(a!) x, Tensor?[] y, *, int[2] z=[1, 2], str s="a, b)") -> (Tensor o, Tensor)',
            list("xyzs"),
        ),
    ],
)
def test_names_of_a_schema_are_those_of_its_arguments(schema, names):
    assert extract_names_from_schema(schema) == names


def test_names_of_an_inferred_schema_are_those_of_the_function():
    def layer(hidden_states: torch.Tensor, caches: list[torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        return hidden_states

    schema = torch.library.infer_schema(layer, mutates_args=())
    assert extract_names_from_schema(schema) == ["hidden_states", "caches", "scale"]


@pytest.mark.parametrize("schema", ["", "Tensor x", "(Tensor x", "(x) -> Tensor"])
def test_what_is_no_schema_is_refused(schema):
    with pytest.raises(FormatError, match=r"no schema|no argument"):
        extract_names_from_schema(schema)


def test_dynamic_shapes_by_position_get_the_names_of_the_parameters():
    named = {"mask": {0: "B"}}
    got = choose_kwargs_for_dynamic_shapes(({0: "B"}, {}), named, ["x", "y", "mask"])
    assert got == {"x": {0: "B"}, "y": {}, "mask": {0: "B"}}
    assert named == {"mask": {0: "B"}}
    with pytest.raises(ConfigError, match=r"goes into \*args has no name"):
        choose_kwargs_for_dynamic_shapes(({}, {}), named, ["x"])
    with pytest.raises(ConfigError, match="mask are given by position and by name"):
        choose_kwargs_for_dynamic_shapes(({},), named, ["mask"])


def test_chosen_dynamic_shapes_are_what_torch_export_takes():
    class Add(nn.Module):
        def forward(self, x, y):
            return x + y

    batch = torch.export.Dim("batch", min=1)
    shapes = choose_kwargs_for_dynamic_shapes(({0: batch},), {"y": {0: batch}}, ["x", "y"])
    exported = torch.export.export(Add(), (X,), {"y": X}, dynamic_shapes=shapes)
    assert torch.equal(exported.module()(torch.ones(5, 3), y=torch.ones(5, 3)), torch.full((5, 3), 2.0))


def test_copies_share_nothing_and_keep_what_is_shared_inside():
    array = np.arange(3)
    source = {"a": [X, (X, None)], "b": array, "c": {1}, "n": 3}
    copied = make_copy(source)
    assert copied["a"][0] is copied["a"][1][0]
    assert copied["a"][0] is not X
    assert copied["b"] is not array
    assert copied["c"] is not source["c"]
    assert torch.equal(copied["a"][0], X)
    assert (copied["b"].tolist(), copied["c"], copied["n"]) == ([0, 1, 2], {1}, 3)
