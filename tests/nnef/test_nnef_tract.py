"""tract itself reads what this room writes: every container, every number type, both block formats, quoted texts."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from t2n_hf.nnef.archive import ArchiveWriter
from t2n_hf.nnef.dat import Payload, array_payload, q4_0_payload, q8_1_payload
from t2n_hf.nnef.ir import Assign, Dim, Document, External, Fragment, Name, Variable
from t2n_hf.nnef.text import to_text

pytestmark = pytest.mark.tract

# tract can abort its process, so it never runs in this one.
_RUN = """
import sys
import numpy as np
import tract
loader = tract.nnef().with_tract_transformers().with_tract_extra().with_extended_identifier_syntax()
model = loader.load(sys.argv[1])
assert sorted(model.property_keys()) == ["license", "quote"], model.property_keys()
names = sys.argv[4].split()  # tract names outputs by their nodes, so they are told apart by their order
results = model.into_runnable().run([np.load(sys.argv[2])])
np.savez(sys.argv[3], **{name: result.to_numpy() for name, result in zip(names, results)})
"""

GENERATOR = np.random.default_rng(0)
TYPES = ["float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool"]
VALUES = {name: np.array([0, 1, 1, 0] if name == "bool" else [1, 2, 3, 100]).astype(name) for name in TYPES}
IDS = np.array([[3, 1, 63, 0, 17]], np.int64)
BIAS = GENERATOR.normal(size=48).astype(np.float32)
SCALE = GENERATOR.normal(size=(1, 1, 48)).astype(np.float16)


def _random_q4_0(rows: int, columns: int) -> tuple[bytes, np.ndarray]:
    nibbles = GENERATOR.integers(0, 16, size=(rows, columns // 32, 32), dtype=np.uint8)
    scales = GENERATOR.normal(size=(rows, columns // 32, 1)).astype(np.float16)
    packed = np.concatenate([scales.view(np.uint8), nibbles[..., :16] | nibbles[..., 16:] << 4], axis=-1)
    return packed.tobytes(), ((nibbles.astype(np.float32) - 8) * scales.astype(np.float32)).reshape(rows, columns)


def _random_q8_1(rows: int, columns: int) -> tuple[bytes, np.ndarray]:
    values = GENERATOR.integers(-127, 128, size=(rows, columns // 32, 32), dtype=np.int8)
    scales = GENERATOR.normal(size=(rows, columns // 32, 1)).astype(np.float16)
    sums = (values.sum(-1, keepdims=True) * scales.astype(np.float32)).astype(np.float16)
    packed = np.concatenate([scales.view(np.uint8), sums.view(np.uint8), values.view(np.uint8)], axis=-1)
    return packed.tobytes(), (values * scales.astype(np.float32)).reshape(rows, columns)


TABLE_BYTES, TABLE = _random_q4_0(64, 96)
WEIGHT_BYTES, WEIGHT = _random_q4_0(48, 96)
EIGHT_BYTES, EIGHT = _random_q8_1(64, 32)


def _payloads() -> dict[str, Payload]:
    return {
        "model.embed.weight": q4_0_payload((64, 96), lambda: [TABLE_BYTES]),
        "model.linear.weight": q4_0_payload((48, 96), lambda: [WEIGHT_BYTES]),
        "a/" + "very_long_name." * 10 + "bias": array_payload(BIAS),
        "scale": array_payload(SCALE),
        "eight": q8_1_payload((64, 32), lambda: [EIGHT_BYTES]),
        **{f"value.{name}": array_payload(values) for name, values in VALUES.items()},
    }


def _body() -> Iterator[Assign]:
    yield Assign(("x",), "tract_core_gather", (Name("w0"), Name("ids")), {"axis": 0, "datum_type": "f32"}, "the table")
    yield Assign(("p", "raised"), "project", (Name("x"), Name("w1"), Name("w2")))
    yield Assign(("s",), "tract_core_cast", (Name("w3"),), {"to": "f32"})
    yield Assign(("linear",), "mul", (Name("p"), Name("s")))
    yield Assign(("gathered",), "tract_core_gather", (Name("w4"), Name("ids")), {"axis": 0, "datum_type": "f32"})
    yield Assign(("clipped",), "max", (Name("x"), -3.4028234663852886e38))
    yield Assign(("numbers",), "mul", (Name("clipped"), 2.5e-3))
    yield Assign(("flat",), "reshape", (Name("x"),), {"shape": [Dim("S*3"), 32]})
    for number, name in enumerate(VALUES):
        yield Assign((f"value_{name}",), "copy", (Name(f"w{number + 5}"),))


def _document() -> Document:
    project = Fragment(
        name="project",
        params=("a", "b", "c"),
        results=("y", "bu"),
        body=(
            Assign(("bu",), "unsqueeze", (Name("c"),), {"axes": [0, 1]}),
            Assign(("wu",), "unsqueeze", (Name("b"),), {"axes": [0]}),
            Assign(("m",), "matmul", (Name("a"), Name("wu")), {"transposeB": True}),
            Assign(("y",), "add", (Name("m"), Name("bu"))),
        ),
        doc="a @ b.T + c; two results",
    )
    variables = [(label, payload.header.shape) for label, payload in _payloads().items()]
    return Document(
        inputs=(External("ids", "i64", (1, Dim("S"))),),
        outputs=("linear", "raised", "gathered", "numbers", "flat", *(f"value_{name}" for name in VALUES)),
        variables=tuple(Variable(f"w{i}", label, shape) for i, (label, shape) in enumerate(variables)),
        body=tuple(_body()),
        fragments=(project,),
        extensions=("tract_registry tract_transformers",),
        symbols=("S",),
        asserts=("S >= 1", "S < 4096"),
        properties={"quote": 'it\'s a "quote" \\ ü # ;', "license": "Apache-2.0 OR MIT"},
    )


@pytest.mark.parametrize(("form", "level"), [("tgz", 0), ("tgz", 6), ("tar", 0), ("dir", 0)])
def test_tract_computes_what_numpy_computes(tmp_path: Path, form: str, level: int):
    pytest.importorskip("tract")
    path = tmp_path / f"model.nnef.{form}"
    with ArchiveWriter(path, form, level=level) as writer:
        writer.add_text("graph.nnef", to_text(_document()))
        for label, payload in _payloads().items():
            writer.add_dat(label, payload)
    np.save(tmp_path / "ids.npy", IDS)
    command = [sys.executable, "-c", _RUN, str(path), str(tmp_path / "ids.npy"), str(tmp_path / "out.npz")]
    done = subprocess.run([*command, " ".join(_document().outputs)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr.partition("Stack backtrace")[0]
    results = np.load(tmp_path / "out.npz")
    rows = TABLE[IDS]
    np.testing.assert_allclose(
        results["linear"], (rows @ WEIGHT.T + BIAS) * SCALE.astype(np.float32), rtol=1e-4, atol=1e-3
    )
    assert np.array_equal(results["raised"], BIAS[None, None])
    assert np.array_equal(results["gathered"], EIGHT[IDS])
    assert np.array_equal(results["flat"], rows.reshape(15, 32))
    np.testing.assert_allclose(results["numbers"], rows * np.float32(2.5e-3), rtol=1e-6)
    for name, values in VALUES.items():
        assert results[f"value_{name}"].dtype == values.dtype
        assert np.array_equal(results[f"value_{name}"], values)
