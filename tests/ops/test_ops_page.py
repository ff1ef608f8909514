"""docs/operators.md says of every operator what its emitter and the cases say."""

from pathlib import Path

import pytest
from case_matrix import Call, built_cases
from operator_page import limits_of, listed_operators, name_of, page

from t2n_hf.export.lower import emitter_table

PAGE = Path(__file__).resolve().parents[2] / "docs/operators.md"


def test_the_page_lists_every_operator_with_an_emitter_and_no_other():
    listed = listed_operators(PAGE.read_text())
    assert set(listed) == {name_of(overload) for overload in emitter_table().overloads()}, (
        "run scripts/operators.py --write"
    )


def test_the_page_says_the_limits_that_emitters_have():
    table, listed = emitter_table(), listed_operators(PAGE.read_text())
    for overload in table.overloads():
        for limit in limits_of(table.get(overload)):
            assert limit.replace("|", "\\|") in listed[name_of(overload)], "run scripts/operators.py --write"


def refusing(emit, x):
    if x.rank > 2:
        raise emit.refuse(f"it has {x.rank} axes; two are the most")
    return x


def test_a_limit_is_the_text_of_what_is_refused():
    assert limits_of(refusing) == ["it has ... axes; two are the most"]


def test_a_row_holds_the_dtypes_and_the_cases_that_call_the_operator():
    calls = {
        "some/one": [Call("aten.silu.default", "float32", False)],
        "some/two": [Call("aten.silu.default", "float16", True)],
        "other/one": [Call("aten.silu.default", "float32", False), Call("aten.nowhere.default", "float32", True)],
    }
    text = page(calls, calls)
    rows = listed_operators(text)
    assert rows["aten.silu.default"] == "| `aten.silu.default` | float16, float32 | free | other 1, some 2 | - |"
    assert rows["aten.silu_.default"] == "| `aten.silu_.default` | - | - | as `aten.silu.default` | - |"
    assert "aten.nowhere.default" not in rows
    assert "| `aten.nowhere.default` | other 1 |" in text


@pytest.mark.slow
def test_the_page_is_what_the_emitters_and_the_cases_say(tmp_path):
    built = built_cases(tmp_path)
    calls, written = ({name: getattr(mine, kind) for name, mine in built.items()} for kind in ("calls", "written"))
    assert PAGE.read_text() == page(calls, written), "run scripts/operators.py --write"
