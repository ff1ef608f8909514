"""Functions with other names in sight and without asserts: all else of them, decorators too, is as it was."""

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from t2n_hf.trace.function_variants import in_scope, with_assignments, without_asserts


def measure(values: Any) -> int:
    return len(values)


def doubled(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    return wrapper


def plus(number):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs) + number

        return wrapper

    return decorate


@doubled
@plus(1)
def measured(values, more=3, *, scale: int = 10):
    """Say how long."""
    return scale * measure(values) + more


def test_a_function_finds_other_names_and_keeps_its_decorators_and_defaults():
    changed = in_scope(measured, {"measure": lambda values: 7})
    assert measured("ab") == 2 * (20 + 3 + 1)
    assert changed("ab") == 2 * (70 + 3 + 1)
    assert changed("ab", 0, scale=1) == 2 * (7 + 0 + 1)


def test_what_is_seen_of_a_function_stays():
    for changed in (in_scope(measured, {"measure": len}), without_asserts(measured)):
        assert inspect.signature(changed) == inspect.signature(measured)
        assert (changed.__name__, changed.__doc__) == ("measured", "Say how long.")
        assert inspect.unwrap(changed).__qualname__ == inspect.unwrap(measured).__qualname__


def test_neither_the_function_nor_its_module_is_changed():
    before = measured.__wrapped__
    in_scope(measured, {"measure": None, "len": None})
    assert measured.__wrapped__ is before
    assert measure("ab") == 2


class Base(nn.Module):
    def forward(self, x, least=1):
        return x + least


def checked_type(limit):
    class Checked(Base):
        @doubled
        def forward(self, x: torch.Tensor, least: int = 2):
            assert x.max().item() <= limit, "too much"
            return super().forward(x, least) + limit

    return Checked


def test_asserts_are_left_out_of_a_method_that_uses_super_and_a_variable_around_it():
    kind = checked_type(4)
    module, x = kind(), torch.tensor([5.0])
    with pytest.raises(AssertionError, match="too much"):
        module(x)
    forward = without_asserts(kind.forward)
    assert forward(module, x).item() == 2 * (5 + 2 + 4)
    assert forward(module, x, least=0).item() == 2 * (5 + 0 + 4)
    with pytest.raises(AssertionError, match="too much"):
        module(x)


@doubled
def decided(x):
    large = x.sum().item() > 3
    return x + 10 if large else x


def test_a_name_is_assigned_something_else():
    assert with_assignments(decided, {"large": "x.ndim == 1"})(torch.ones(2)).tolist() == [22, 22]
    assert decided(torch.ones(2)).tolist() == [2, 2]


def test_what_is_assigned_may_come_from_another_scope():
    changed = in_scope(with_assignments(decided, {"large": "asked()"}), {"asked": lambda: True})
    assert changed(torch.ones(1)).tolist() == [22]


def test_a_name_that_is_not_assigned_is_refused():
    with pytest.raises(KeyError, match="decided assigns no small"):
        with_assignments(decided, {"small": "True"})


def test_lines_of_a_function_without_asserts_are_those_of_its_file():
    forward = without_asserts(checked_type(4).forward)
    with pytest.raises(AttributeError) as caught:
        forward(None, torch.zeros(1))
    trace = caught.tb
    while trace.tb_next is not None:
        trace = trace.tb_next
    lines, first = inspect.getsourcelines(checked_type)
    assert trace.tb_frame.f_code.co_filename == __file__
    assert "super().forward" in lines[trace.tb_lineno - first]


@pytest.mark.parametrize("change", [without_asserts, lambda function: in_scope(function, {})])
def test_what_is_not_written_in_python_is_refused(change):
    with pytest.raises(TypeError, match="no function of Python code"):
        change(len)
