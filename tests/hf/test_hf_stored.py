import json

import pytest

from t2n_hf.errors import FormatError
from t2n_hf.hf.stored import StoredForm, StoredForms, key_of_part

FORM = StoredForm("t2n_hf.q4_0.v1", ("q4_0",), {"dtype": "float32"})
OTHER = StoredForm("t2n_hf.q4_0.v1", ("q4_0",), {"dtype": "bfloat16"})


def test_equal_layers_are_written_once():
    forms = StoredForms({f"model.layers.{i}.mlp.up_proj.weight": FORM for i in range(12)})
    assert list(forms.to_json()) == ["model.layers.*.mlp.up_proj.weight"]


def test_layers_that_differ_are_written_each():
    named = {f"model.layers.{i}.weight": (OTHER if i == 1 else FORM) for i in range(3)}
    text = json.loads(json.dumps(StoredForms(named).to_json()))
    assert {name: StoredForms.from_json(text).find(name) for name in named} == named


def test_forms_survive_json():
    named = {"lm_head.weight": FORM, "model.layers.0.a.weight": FORM, "model.layers.1.a.weight": FORM}
    read = StoredForms.from_json(json.loads(json.dumps(StoredForms(named).to_json())))
    assert all(read.find(name) == FORM for name in named)
    assert read.find("model.norm.weight") is None


def test_a_model_without_its_head_finds_its_weights():
    forms = StoredForms({"model.layers.0.a.weight": FORM})
    assert forms.find("layers.0.a.weight", "model") == FORM
    assert StoredForms({"layers.0.a.weight": FORM}).find("model.layers.0.a.weight", "model") == FORM


def test_parts_are_named_by_the_last_name_of_their_parameter():
    forms = StoredForms({"a.weight": FORM, "b.gate_up_proj": StoredForm("x.y.v1", ("scale", "q"))})
    assert forms.serialized_names() == {
        "gate_up_proj": ["gate_up_proj_q", "gate_up_proj_scale"],
        "weight": ["weight_q4_0"],
    }
    assert key_of_part("a.weight", "q4_0") == "a.weight_q4_0"


@pytest.mark.parametrize(
    "value", [[], "x", {"a": 1}, {"a": {"tag": "t"}}, {"a": {"tag": "t", "parts": ["../x"], "meta": {}}}]
)
def test_a_config_that_is_damaged_is_refused(value):
    with pytest.raises(FormatError, match=r"config\.json"):
        StoredForms.from_json(value)
