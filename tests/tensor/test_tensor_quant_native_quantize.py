"""Compiled code that quantizes: numpy's blocks bit for bit, torch's refusals word for word, begun when it pays."""

import shutil
import subprocess

import numpy as np
import pytest
import torch
from q4_0_rule import numpy_blocks
from torch._subclasses.fake_tensor import FakeTensorMode

from t2n_hf.errors import QuantizationError
from t2n_hf.tensor.quant import native_quantize
from t2n_hf.tensor.quant.native_quantize import NativeQuantizing, native_quantizer
from t2n_hf.tensor.quant.q4_0_blocks import quantize_rows, quants_of, scales_of

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler on this machine"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compiled(folder):
    found, report = native_quantizer(folder)
    assert found is not None, report
    return found


def rows_of(kind):
    rows = noise(150, 96)
    if kind == "both signs":  # nearly every block holds its largest value with both signs
        return torch.randint(-8, 9, (150, 96), generator=torch.Generator().manual_seed(1)).float()
    if kind == "small and large":  # scales from nothing over subnormal ones to the largest of f16
        return (rows * torch.logspace(-10, 5.5, 150).unsqueeze(1)).clamp(-520192, 520192)
    if kind == "one sign":
        return torch.where(torch.arange(150).unsqueeze(1) % 2 == 0, rows.abs(), -rows.abs())
    if kind == "zeros":
        return torch.where(rows > 0, torch.tensor(0.0), torch.tensor(-0.0))
    if kind == "halfway":  # quotients that end on .5, and scales between two of f16
        return torch.randint(-16, 17, (150, 96), generator=torch.Generator().manual_seed(2)) * 0.5 * (1 + 2**-11)
    return rows


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "both signs", "small and large", "one sign", "zeros", "halfway"])
def test_blocks_are_those_of_the_rule(compiled, kind, dtype):
    rows = rows_of(kind)
    rows = (rows.clamp(-60000, 60000) if dtype is torch.float16 else rows).to(dtype)
    before = rows.clone()
    blocks = compiled.quantize(rows)
    scales, quants = numpy_blocks(rows)
    assert blocks.shape == (150, 3, 18)
    np.testing.assert_array_equal(scales_of(blocks).reshape(-1).view(torch.int16).numpy(), scales.view(np.int16))
    np.testing.assert_array_equal(quants_of(blocks).reshape(-1, 32).numpy(), quants)
    assert torch.equal(rows, before)


@needs_compiler
def test_each_f16_and_each_bf16_is_quantized_as_by_torch(compiled):
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for dtype, largest in ((torch.float16, 65504.0), (torch.bfloat16, 524032.0)):
        values = bits.view(dtype)
        values = values[values.float().abs() <= largest]
        # Each value beside 31 others, and each one as the largest of its block.
        for rows in (
            values[: len(values) // 32 * 32].view(-1, 32),
            values.unsqueeze(1) * torch.linspace(-1, 1, 32).to(dtype),
        ):
            assert torch.equal(compiled.quantize(rows), quantize_rows(rows))


@needs_compiler
@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (5000, 1024)], ids=str)
def test_there_may_be_few_rows_or_more_than_one_call_takes(compiled, shape):
    rows = noise(*shape)
    assert torch.equal(compiled.quantize(rows), quantize_rows(rows))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_may_lie_anywhere_in_memory(compiled, dtype):
    wide = noise(64, 300).to(dtype)
    for rows in (wide[:, 1:97], wide.T[:96].T, wide[::3, :32]):
        assert torch.equal(compiled.quantize(rows), quantize_rows(rows.contiguous()))


@needs_compiler
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 524288.0, -1e30])
@pytest.mark.parametrize("place", [0, 31, 32 * 64, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bad_values_are_refused_in_the_words_of_torch(folder, compiled, bad, place, dtype):
    rows = noise(100, 64).to(dtype)
    rows.view(-1)[place] = bad
    assert compiled.quantize(rows) is None
    with pytest.raises(QuantizationError) as expected:
        quantize_rows(rows, "some.weight")
    with pytest.raises(QuantizationError) as found:
        NativeQuantizing(folder).quantize(rows, "some.weight")
    assert str(found.value) == str(expected.value)


@needs_compiler
def test_the_largest_value_that_a_scale_reaches_is_taken(compiled):
    rows = torch.full((1, 32), 524159.96875)
    assert torch.equal(compiled.quantize(rows), quantize_rows(rows))
    assert compiled.quantize(torch.full((1, 32), 524160.0)) is None


class Compilers:
    """Stands before subprocess.run, and counts."""

    def __init__(self, monkeypatch):
        self.count, self._run = 0, subprocess.run
        monkeypatch.setattr(subprocess, "run", self)

    def __call__(self, *args, **kwargs):
        self.count += 1
        return self._run(*args, **kwargs)


@needs_compiler
def test_code_is_compiled_when_a_process_has_quantized_much_and_used_by_the_next_from_the_start(tmp_path, monkeypatch):
    compilers = Compilers(monkeypatch)
    rows, used = noise(32, 64), []
    spied = native_quantize.NativeQuantizer.quantize
    monkeypatch.setattr(
        native_quantize.NativeQuantizer, "quantize", lambda self, rows: used.append(len(rows)) or spied(self, rows)
    )

    def uses(quantizing, times):
        used.clear()
        for _ in range(times):
            assert torch.equal(quantizing.quantize(rows), quantize_rows(rows))
        return used.count(len(rows))

    first = NativeQuantizing(tmp_path / "code", patience_values=3 * rows.numel())
    assert uses(first, 3) == compilers.count == 0
    assert uses(first, 2) == 2
    assert compilers.count == 1
    assert uses(NativeQuantizing(tmp_path / "code"), 2) == 2
    assert compilers.count == 1


def test_without_a_compiler_torch_quantizes(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    quantizing = NativeQuantizing(tmp_path, patience_values=0)
    for _ in range(2):
        assert torch.equal(quantizing.quantize(noise(4, 32)), quantize_rows(noise(4, 32)))
    assert native_quantizer(tmp_path) == (None, "no C compiler (cc, gcc, clang) is on the PATH")


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [("8.5f", "8.4f"), ("0xFFFu + ", "0x1000u + "), ("> (low & MAGNITUDE) ?", "> 0 ?"), ("++first;", "break;")],
    ids=str,
)
def test_code_that_gives_other_blocks_is_not_used(tmp_path, monkeypatch, change):
    wrong = tmp_path / "q4_0_quantize.c"
    assert change[0] in native_quantize.SOURCE.read_text()
    wrong.write_text(native_quantize.SOURCE.read_text().replace(*change))
    monkeypatch.setattr(native_quantize, "SOURCE", wrong)
    found, reason = native_quantizer(tmp_path / "code")
    assert found is None
    assert reason.startswith("the compiled code gives other blocks than torch for torch.")
    assert torch.equal(NativeQuantizing(tmp_path / "code").quantize(noise(4, 32)), quantize_rows(noise(4, 32)))


@needs_compiler
def test_code_that_takes_what_torch_refuses_is_not_used(tmp_path, monkeypatch):
    wrong = tmp_path / "q4_0_quantize.c"
    wrong.write_text(native_quantize.SOURCE.read_text().replace("return 1;", ";"))
    monkeypatch.setattr(native_quantize, "SOURCE", wrong)
    assert native_quantizer(tmp_path / "code") == (None, "the compiled code takes nan in torch.bfloat16")


@needs_compiler
def test_what_torch_records_or_fakes_and_many_threads_are_left_to_torch(folder, compiled, monkeypatch):
    monkeypatch.setattr(native_quantize.NativeQuantizer, "quantize", lambda *_: pytest.fail("compiled code was used"))
    quantizing, rows = NativeQuantizing(folder), noise(4, 32)
    assert not native_quantize._is_plain(torch.nn.Parameter(rows))
    assert not native_quantize._is_plain(torch.empty(4, 32, device="meta"))
    assert not native_quantize._is_plain(torch.view_as_complex(noise(4, 32, 2)).conj().imag)
    with FakeTensorMode():
        assert not native_quantize._is_plain(rows)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert torch.equal(quantizing.quantize(rows), quantize_rows(rows))
