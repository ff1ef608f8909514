import subprocess
import sys

import pytest
import torch
from torch import fx

from t2n_hf.ops.table import EMITTERS, EmitterTable
from t2n_hf.places import python_name, source_line

aten = torch.ops.aten


def first(emit, x):
    return x


def second(emit, x):
    return x


def test_two_emitters_for_one_overload_are_an_error_that_names_both():
    table = EmitterTable()
    table.emits(aten.relu.default)(first)
    with pytest.raises(ValueError, match=r"aten\.relu\.default has two emitters: .*first and .*second"):
        table.emits(aten.relu.default)(second)


def test_one_emitter_may_have_many_overloads_and_overloads_are_told_apart():
    table = EmitterTable()
    table.emits(aten.add.Tensor, aten.sub.Tensor)(first)
    assert aten.add.Tensor in table
    assert aten.add.Scalar not in table
    assert table.get(aten.add.Scalar) is None


def test_an_extended_table_leaves_the_first_as_it_was():
    table = EmitterTable()
    more = table.extended({aten.relu.default: first})
    assert aten.relu.default in more
    assert len(table) == 0
    with pytest.raises(ValueError, match="two emitters"):
        more.extended({aten.relu.default: second})


def test_importing_the_room_registers_every_family():
    assert len(EMITTERS) > 300
    assert aten.scaled_dot_product_attention.default in EMITTERS


def test_emitters_know_neither_transformers_nor_the_capture():
    code = "import sys, t2n_hf.ops; print([m for m in sys.modules if m.startswith(('t2n_hf.trace', 't2n_hf.tensor'))])"
    light = "import types, sys; p = types.ModuleType('t2n_hf'); p.__path__ = [sys.argv[1]]; sys.modules['t2n_hf'] = p; "
    import t2n_hf

    answer = subprocess.run(
        [sys.executable, "-c", light + code, t2n_hf.__path__[0]], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


FRAME = 'File "{file}", line 7, in forward\n    {code}\n'


def node(*frames, name="mul_3", module="decoder.norm"):
    made = fx.Graph().placeholder(name)
    made.meta["stack_trace"] = "".join(FRAME.format(file=file, code=code) for file, code in frames)
    made.meta["nn_module_stack"] = {"k": (module, object)}
    return made


@pytest.mark.parametrize(
    ("frames", "name"),
    [
        ([("model.py", "hidden = self.norm(x)")], "hidden"),
        ([("model.py", "q, k = rotate(q, k)")], "q"),
        ([("model.py", "x: Tensor = f(x)")], "x"),
        ([("model.py", "x += y")], "x"),
        ([("model.py", "return x == y")], "norm"),
        ([("model.py", "f(a=1)")], "norm"),
        ([("model.py", "y = self.linear(x)"), ("/lib/torch/nn/modules/linear.py", "return F.linear(x)")], "norm"),
        ([], "norm"),
    ],
    ids=["assigned", "several", "annotated", "augmented", "comparison", "keyword", "module of torch", "nothing"],
)
def test_values_are_named_after_python(frames, name):
    assert python_name(node(*frames)) == name


def test_a_value_without_a_name_in_python_is_named_after_its_operator():
    assert python_name(node(module="layers.0")) == "mul"


def test_a_place_in_the_source_is_one_of_the_model_not_of_torch():
    place = source_line(node(("model.py", "y = self.linear(x)"), ("/lib/torch/nn/modules/linear.py", "return F(x)")))
    assert place == "model.py:7: y = self.linear(x)"
