"""Documents that compute the same, and documents that do not."""

from dataclasses import replace

import pytest

from t2n_hf.nnef.ir import Assign, Call, Document, External, Fragment, Name, Variable
from t2n_hf.nnef.meaning import meaning_of

X = External("x", "f32", (2,))
W = Variable("w", "w", (2,))


def document(*body, fragments=(), variables=(W,), outputs=("y",)):
    return Document(inputs=(X,), outputs=outputs, variables=variables, body=body, fragments=fragments)


def call(result, op, *args, **kwargs):
    return Assign((result,), op, tuple(Name(arg) if isinstance(arg, str) else arg for arg in args), kwargs)


PLAIN = document(call("a", "mul", "x", "w"), call("y", "add", "a", 1.0))
LAYER = Fragment("layer", ("left", "right"), ("out",), (call("out", "mul", "left", "right"),))
LOOP = Fragment("body", ("state",), ("next",), (call("next", "neg", "state"),))


def looped(loop):
    return document(Assign(("y",), "tract_core_scan", (loop.name, Name("x"))), fragments=(loop,))


@pytest.mark.parametrize(
    "other",
    [
        document(call("other", "mul", "x", "w"), call("y", "add", "other", 1.0)),
        document(call("a", "mul", "x", "w"), call("b", "copy", "a"), call("y", "add", "b", 1.0)),
        document(call("a", "layer", "x", "w"), call("y", "add", "a", 1.0), fragments=(LAYER,)),
        document(call("a", "layer", "x", right=Name("w")), call("y", "add", "a", 1.0), fragments=(LAYER,)),
        document(call("y", "add", Call("mul", (Name("x"), Name("w"))), 1.0)),
        document(call("z", "neg", "x"), call("a", "mul", "x", "w"), call("y", "add", "a", 1.0)),
        document(call("a", "mul", "x", "v"), call("y", "add", "a", 1.0), variables=(Variable("v", "w", (2,)),)),
    ],
    ids=["names", "copy", "fragment", "by_name", "nested", "unused", "variable"],
)
def test_names_and_forms_do_not_matter(other):
    assert meaning_of(other, {}) == meaning_of(PLAIN, {})


@pytest.mark.parametrize(
    "other",
    [
        document(call("a", "mul", "x", "w"), call("y", "add", "a", 2.0)),
        document(call("a", "mul", "x", "w"), call("y", "add", "a", 1)),
        document(call("a", "mul", "w", "x"), call("y", "add", "a", 1.0)),
        document(call("a", "mul", "x", "w"), call("y", "sub", "a", 1.0)),
        document(call("a", "mul", "x", "w"), call("b", "add", "a", 1.0), outputs=("b",)),
        document(call("a", "mul", "x", "w"), call("y", "add", "a", 1.0), variables=(replace(W, label="v"),)),
        replace(PLAIN, asserts=("S >= 1",)),
        replace(PLAIN, inputs=(replace(X, dtype="f16"),)),
    ],
    ids=["number", "kind", "order", "op", "output", "label", "assert", "input"],
)
def test_what_is_computed_matters(other):
    assert meaning_of(other, {}) != meaning_of(PLAIN, {})


def test_what_a_variable_is_known_by_stands_for_its_label():
    other = document(call("a", "mul", "x", "w"), call("y", "add", "a", 1.0), variables=(replace(W, label="v"),))
    assert meaning_of(other, {"v": "digest"}) == meaning_of(PLAIN, {"w": "digest"})
    assert meaning_of(other, {"v": "another"}) != meaning_of(PLAIN, {"w": "digest"})


def test_the_body_of_a_loop_counts_and_not_its_name():
    assert meaning_of(looped(LOOP), {}) == meaning_of(looped(replace(LOOP, name="other")), {})
    changed = replace(LOOP, body=(call("next", "abs", "state"),))
    assert meaning_of(looped(LOOP), {}) != meaning_of(looped(changed), {})
