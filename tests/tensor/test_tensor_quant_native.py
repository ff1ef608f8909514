"""Compiled code that makes rows dense: torch's numbers bit for bit, kept between processes, absent without harm."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from t2n_hf.tensor import QTensorTractScaleOnly
from t2n_hf.tensor.compute import compute_mode
from t2n_hf.tensor.quant import kernels, native
from t2n_hf.tensor.quant.kernels import TorchInt4Kernel, int4_kernel
from t2n_hf.tensor.quant.native import native_dense
from t2n_hf.tensor.quant.q4_0_blocks import quantize_rows

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler on this machine"
)
needs_kernel = pytest.mark.skipif(int4_kernel() is None, reason="no int4 kernel on this machine")


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    found, report = native_dense(tmp_path_factory.mktemp("compiled"))
    assert found is not None, report
    return found


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [16, 32, 64])
def test_numbers_are_those_of_torch_in_every_layout(reader, width, dtype):
    # Scales from subnormal to the largest, both signs, and blocks of zeros.
    rows = noise(200, 96) * torch.logspace(-9, 5, 200).unsqueeze(1)
    rows[7] = 0
    kernel = TorchInt4Kernel(width)
    layout = kernel.pack(quantize_rows(rows))
    for start, stop in ((0, 200), (64, 130), (128, 129)):
        found = reader.dense(*layout, range(start, stop, width), dtype)
        assert found.shape == (stop - start, 96)
        expected = kernel.dense(layout, start, stop, dtype)
        assert torch.equal(found.contiguous().view(torch.int16), expected.contiguous().view(torch.int16))


@needs_compiler
@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 17, 300])
def test_compiled_products_are_near_the_exact_ones_for_any_number_of_rows(rows, dtype, monkeypatch, reader):
    monkeypatch.setattr(kernels, "_native_probed", lambda: (reader, "here"))
    weight = QTensorTractScaleOnly.quantize(noise(150, 64), dtype=dtype)
    x, bias = noise(2, rows, 64, seed=1, dtype=dtype), noise(150, seed=2, dtype=dtype)
    expected = F.linear(x, weight.to_base_tensor(), bias).float()
    compiled = weight.with_compute("compiled")
    assert compiled.compute == "compiled"
    for result in (F.linear(x, compiled, bias), scoped(x, weight, bias)):
        assert result.dtype == dtype
        assert torch.allclose(result.float(), expected, rtol=0.02, atol=0.1)
    assert compiled.opaque_nbytes == QTensorTractScaleOnly.resident_nbytes((150, 64), "compiled")
    assert torch.equal(compiled.to_base_tensor(), weight.to_base_tensor())


def scoped(x, weight, bias):
    with compute_mode("compiled"):
        return F.linear(x, weight, bias)


@needs_compiler
def test_code_is_compiled_once_and_kept(tmp_path, monkeypatch):
    _, first = native_dense(tmp_path / "new" / "folder")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    found, again = native_dense(tmp_path / "new" / "folder")
    assert found is not None
    assert first == again
    assert first.startswith(str(tmp_path))
    assert [path.suffix for path in (tmp_path / "new" / "folder").iterdir()] == [".so"]


def compiler_that(tmp_path, monkeypatch, does):
    script = tmp_path / "bin" / "cc"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\n{does}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:/bin:/usr/bin")


def test_without_a_compiler_there_is_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native_dense(tmp_path) == (None, "no C compiler (cc, gcc, clang) is on the PATH")


def test_what_the_compiler_says_is_the_reason(tmp_path, monkeypatch):
    compiler_that(tmp_path, monkeypatch, "echo stray sun >&2; exit 1")
    found, reason = native_dense(tmp_path / "code")
    assert found is None
    assert "cannot compile q4_0_dense.c: stray sun" in reason
    assert list((tmp_path / "code").iterdir()) == []


def test_a_library_that_is_none_is_refused(tmp_path, monkeypatch):
    compiler_that(tmp_path, monkeypatch, 'while [ "$1" != "-o" ]; do shift; done; echo words > "$2"')
    found, reason = native_dense(tmp_path / "code")
    assert found is None
    assert reason.startswith("OSError: ")


@needs_compiler
@pytest.mark.parametrize("left", [0.0, 0.5, 1.0], ids=["nothing", "a_half", "zeros_at_the_end"])
def test_code_that_was_damaged_is_compiled_anew(left, tmp_path):
    _, path = native_dense(tmp_path)
    whole = Path(path).read_bytes()
    kept = whole[: int(len(whole) * left)] if left < 1 else whole[:-4096] + bytes(4096)
    (tmp_path / "damaged").write_bytes(kept)  # this process has the file itself mapped
    (tmp_path / "damaged").chmod(0o700)
    (tmp_path / "damaged").replace(path)
    script = "import sys; from pathlib import Path; from t2n_hf.tensor.quant.native import native_dense\n"
    script += "found, report = native_dense(Path(sys.argv[1])); sys.exit(report if found is None else 0)"
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert native_dense(tmp_path)[1] == path
    assert Path(path).read_bytes() == whole


def test_a_compiler_may_speak_in_any_encoding(tmp_path, monkeypatch):
    compiler_that(tmp_path, monkeypatch, r"printf 'Gr\374\337e' >&2; exit 1")
    assert "cannot compile q4_0_dense.c: Gr" in native_dense(tmp_path / "code")[1]


@needs_compiler
def test_code_that_another_user_can_write_is_not_loaded(tmp_path):
    tmp_path.chmod(0o777)
    found, reason = native_dense(tmp_path)
    assert found is None
    assert f"{tmp_path} belongs to, or can be written by, another user" in reason


@needs_compiler
def test_a_folder_that_cannot_be_made_is_a_reason(tmp_path):
    (tmp_path / "file").write_text("")
    found, reason = native_dense(tmp_path / "file" / "code")
    assert found is None
    assert "Error: " in reason


@needs_kernel
def test_without_native_code_compiled_computes_as_fast_and_warns_once(monkeypatch):
    monkeypatch.setattr(kernels, "native_dense", lambda: (None, "no compiler"))
    kernels._native_probed.cache_clear()
    try:
        weight = QTensorTractScaleOnly.quantize(noise(64, 64))
        fast, compiled = weight.with_compute("fast"), weight.with_compute("compiled")
        x = noise(300, 64, seed=1)
        with pytest.warns(UserWarning, match='compute="compiled" computes as "fast" does: no compiler'):
            assert torch.equal(F.linear(x, compiled), F.linear(x, fast))
        assert torch.equal(F.linear(x, compiled), F.linear(x, fast))
        assert kernels.native_report() == "no compiler"
    finally:
        kernels._native_probed.cache_clear()


@needs_kernel
def test_code_that_gives_other_numbers_is_not_used(monkeypatch):
    class Wrong(native.NativeDense):
        def __init__(self):
            pass

        def dense(self, packed, scales, rows, dtype):
            return torch.zeros(rows.stop - rows.start, packed.shape[1] * 2, dtype=dtype)

    assert "other numbers than torch" in kernels._probe_native(Wrong(), int4_kernel())


def test_with_many_threads_torch_itself_makes_rows_dense(reader, monkeypatch):
    assert reader.takes(torch.bfloat16)
    assert not reader.takes(torch.float16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert not reader.takes(torch.bfloat16)
