"""Documents as text."""

from dataclasses import replace

import pytest

from t2n_hf.errors import FormatError
from t2n_hf.nnef.ir import Assign, Dim, Document, External, Fragment, Name, Variable
from t2n_hf.nnef.text import to_text

DOCUMENT = Document(
    inputs=(External("x", "f32", (1, Dim("S"), 32)),),
    outputs=("y",),
    variables=(Variable("w", "model.w", (48, 32)),),
    fragments=(
        Fragment(
            name="project",
            params=("a", "b"),
            results=("c",),
            body=(
                Assign(("bu",), "unsqueeze", (Name("b"),), {"axes": [0]}),
                Assign(("c",), "matmul", (Name("a"), Name("bu")), {"transposeB": True}),
            ),
            doc="a @ b.T",
        ),
    ),
    body=(
        Assign(("p",), "project", (Name("x"), Name("w")), comment="layer\n0"),
        Assign(("h", "t"), "split", (Name("p"),), {"axis": 2, "ratios": [1, 1]}),
        Assign(("y",), "reshape", (Name("h"),), {"shape": [1, Dim("S"), 6, 4]}),
    ),
    extensions=("tract_registry tract_transformers",),
    symbols=("S",),
    asserts=("S >= 1",),
    properties={"model": "it's"},
)

TEXT = r"""version 1.0;

extension tract_registry tract_core;
extension tract_registry tract_transformers;
extension tract_symbol S;
extension tract_assert S >= 1;

fragment tract_core_properties() -> (properties: (string, tensor<scalar>)[])
{
  properties = [
    ("model", "it\'s")
  ];
}

# a @ b.T
fragment project(a: tensor<scalar>, b: tensor<scalar>) -> (c: tensor<scalar>)
{
  bu = unsqueeze(b, axes=[0]);
  c = matmul(a, bu, transposeB=true);
}

graph network(
  x
) -> (
  y
)
{
  x = tract_core_external(shape=[1, S, 32], datum_type="f32");
  w = variable<scalar>(label="model.w", shape=[48, 32]);
  p = project(x, w);  # layer 0
  (h, t) = split(p, axis=2, ratios=[1, 1]);
  y = reshape(h, shape=[1, S, 6, 4]);
}
"""


def test_a_document_is_written_line_by_line():
    assert to_text(DOCUMENT) == TEXT


def _body(*assigns: Assign) -> Document:
    return replace(DOCUMENT, body=(*assigns, Assign(("y",), "copy", (Name("x"),))))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (3, "3"),
        (-3, "-3"),
        (2.0, "2.0"),
        (1e-6, "1e-06"),
        (1e20, "1e+20"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        ("f32", '"f32"'),
        (Dim("S+1"), "S+1"),
        ([1, [Name("x"), 2.5]], "[1, [x, 2.5]]"),
        ((Name("x"), "a"), '(x, "a")'),
        ([], "[]"),
    ],
    ids=str,
)
def test_each_kind_of_argument_has_its_text(value, text: str):
    assert f"  z = op({text});\n" in to_text(_body(Assign(("z",), "op", (value,))))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (_body(Assign(("z",), "op", (Name("nowhere"),))), "z = op in network: 'nowhere' has no value"),
        (_body(Assign(("z",), "op", (Name("y"),))), "'y' has no value at this point"),
        (_body(Assign(("x",), "op")), "result of op in network 'x': the name is taken"),
        (_body(Assign(("S",), "op")), "the name is taken"),
        (_body(Assign(("a.b",), "op")), "'a.b' is no NNEF identifier"),
        (_body(Assign(("z",), "op; x")), "operator name 'op; x'"),
        (_body(Assign(("z",), "op", (), {"graph": 1})), "argument name 'graph'"),
        (_body(Assign(("z",), "op", (float("nan"),))), "z = op in network: NaN cannot be written"),
        (_body(Assign(("z",), "op", ("a\nb",))), "not printable"),
        (_body(Assign(("z",), "op", (Dim("S;"),))), "no integer expression"),
        (_body(Assign(("z",), "op", (None,))), "cannot write None of type NoneType"),
        (replace(DOCUMENT, outputs=("q",)), "output 'q' has no value"),
        (replace(DOCUMENT, variables=DOCUMENT.variables * 2), "variable 'w': the name is taken"),
        (replace(DOCUMENT, variables=(*DOCUMENT.variables, Variable("v", "model.w", (1,)))), "share one .dat file"),
        (replace(DOCUMENT, variables=(Variable("w", "../w", (48, 32)),)), "cannot name a file"),
        (replace(DOCUMENT, asserts=("S >= 1; extension x",)), "each is one statement"),
        (replace(DOCUMENT, fragments=DOCUMENT.fragments * 2), "fragment 'project': the name is taken"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_document_that_tract_would_misread_is_refused(document: Document, message: str):
    with pytest.raises(FormatError, match=message):
        to_text(document)


def test_further_inputs_and_outputs_add_no_line_but_their_own():
    def lines(count: int) -> int:
        names = tuple(f"in_cache_key_{i}" for i in range(count))
        inputs = (*DOCUMENT.inputs, *(External(name, "f32", (1,)) for name in names))
        return to_text(replace(DOCUMENT, inputs=inputs, outputs=(*DOCUMENT.outputs, *names))).count("\n")

    assert [lines(count) - lines(0) for count in (1, 2, 200)] == [1, 2, 200]


def test_long_signatures_of_fragments_are_wrapped():
    names = tuple(f"a_rather_long_parameter_name_{i}" for i in range(20))
    fragment = Fragment("wide", names, ("r",), (Assign(("r",), "copy", (Name(names[0]),)),))
    text = to_text(replace(DOCUMENT, fragments=(*DOCUMENT.fragments, fragment)))
    assert max(map(len, text.splitlines())) <= 120
    assert all(f"{name}: tensor<scalar>" in text for name in names)
