import subprocess
import sys
from collections import OrderedDict, defaultdict, deque, namedtuple

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutput

from t2n_hf.errors import FormatError
from t2n_hf.trace import tree_spec_as_name, tree_spec_from_name

Pair = namedtuple("Pair", "left right")
TREES = {
    "leaf": 1,
    "empty": [],
    "nested": [1, (2, {"a": 3, "b": [4, None]}), ()],
    "other keys": {1: 0, "1": 0, (2, "x"): 0, None: 0, 1.5: 0},
    "named tuple": Pair(1, [2]),
    "ordered": OrderedDict(z=1, a=2),
    "default": defaultdict(list, {"x": [1]}),
    "deque": deque([1, 2], maxlen=3),
    "result of torch": torch.ones(2, 2).max(dim=0),
    "model output": BaseModelOutput(last_hidden_state=1, hidden_states=(2, 3)),
    "text that needs escapes": {'"]\n_': 1},
    "dtypes": {torch.float16: 1, torch.device("cpu"): 2},
}


@pytest.mark.parametrize("name", TREES)
def test_a_structure_is_equal_after_a_journey_through_text(name):
    flat, spec = pytree.tree_flatten(TREES[name])
    text = tree_spec_as_name(spec, len(flat))
    count, back = tree_spec_from_name(text)
    assert (count, back) == (len(flat), spec)
    assert type(pytree.tree_unflatten(flat, back)) is type(TREES[name])
    assert tree_spec_as_name(back, count) == text


def test_the_text_can_be_read_by_a_person():
    spec = pytree.tree_structure({"x": 1, "y": (2, 3)})
    want = '___3_["builtins.dict",["x","y"],["*",["builtins.tuple",null,["*","*"]]]]'
    assert tree_spec_as_name(spec, 3) == want


def test_another_number_of_leaves_is_refused_on_both_ways():
    spec = pytree.tree_structure([1, 2])
    with pytest.raises(FormatError, match="has 2 leaves, n_elements is 3"):
        tree_spec_as_name(spec, 3)
    with pytest.raises(FormatError, match="has 2 leaves, and says that it has 3"):
        tree_spec_from_name(tree_spec_as_name(spec, 2).replace("___2", "___3"))


def test_a_context_without_a_text_is_refused():
    spec = pytree.TreeSpec(dict, [object()], [pytree.tree_structure(0)])
    with pytest.raises(FormatError, match="holds a object"):
        tree_spec_as_name(spec, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no structure"),
        ("___1_", "is no structure"),
        ("___x_*", "is no structure"),
        ('___1_["builtins.list"', "cannot be read"),
        ('___1_["os.system",null,["*"]]', "os.system is not registered"),
        ('___1_["builtins.list",null,"*"]', "is no structure"),
        ('___1_{"a":1}', "is no structure"),
        ('___1_["builtins.dict",[{"class":"subprocess:Popen"}],["*"]]', "no named tuple"),
        ('___1_["collections.namedtuple",{"class":"builtins:eval"},["*"]]', "no named tuple"),
        ('___1_["builtins.dict",[{"dtype":"load"}],["*"]]', "no dtype"),
        ('___1_["builtins.dict",[{"device":"nowhere"}],["*"]]', "is no device"),
        ('___1_["builtins.dict",[{"dict":[[{"dict":[]},1]]}],["*"]]', "is no dict"),
        ('___1_["builtins.dict",[{"pickle":"gASV"}],["*"]]', "no part of a structure"),
        ("___1_" + '["builtins.list",null,[' * 100_000, "cannot be read"),
    ],
)
def test_text_that_nobody_wrote_is_refused_and_runs_nothing(text, message):
    with pytest.raises(FormatError, match=message):
        tree_spec_from_name(text)


def test_a_text_is_read_in_another_process():
    text = tree_spec_as_name(pytree.tree_structure(TREES["model output"]), 3)
    program = f"""
import transformers.modeling_outputs
from t2n_hf.trace import tree_spec_from_name
from torch.utils import _pytree as pytree
count, spec = tree_spec_from_name({text!r})
print(count, pytree.tree_unflatten([7, 8, 9], spec).hidden_states)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "3 (8, 9)"
