import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from t2n_hf.contract import InferenceTarget, OffloadState, SupportsOffloadState
from t2n_hf.errors import FormatError, QuantizationError
from t2n_hf.export.weights import Weight, plan_weight, total_by_format
from t2n_hf.hf.plan import Choice
from t2n_hf.nnef.dat import HEADER_NBYTES, read_dat, read_header, write_dat
from t2n_hf.store.checkpoint import CheckpointIndex
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.opaque import OpaqueTensor
from t2n_hf.tensor.quant.q4_0 import QTensorTractScaleOnly
from t2n_hf.tensor.transposed import TransposedTensor

F32, F16 = InferenceTarget(dtype="f32"), InferenceTarget(dtype="f16")


def weight(value, **options):
    facts = {"label": "w", "name": "layer.weight", "value": value, "shape": tuple(value.shape)}
    return Weight(**{**facts, **options})


def written(weight, target, folder):
    """Write a weight the way the archive does, and read it back with numpy alone."""
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    planned = plan_weight(weight, target)
    write_dat(folder / "w.dat", planned.open(scratch))
    assert (folder / "w.dat").stat().st_size == planned.nbytes
    assert not list(scratch.iterdir())
    return read_dat(folder / "w.dat")


def offloaded(tensor, folder, dtype=None):
    save_file({"x": tensor}, folder / "model.safetensors")
    return OffloadedTensor.from_byte_range(CheckpointIndex.open(folder)["x"], "layer.weight", dtype=dtype)


@pytest.mark.parametrize("target", [F32, F16], ids=lambda t: t.dtype)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", ["memory", "file"])
def test_a_dense_weight_has_the_values_of_a_cast_by_torch(where, dtype, target, tmp_path):
    value = torch.randn(37, 65).to(dtype)
    expected = value.to(torch.float32 if target is F32 else torch.float16).numpy()
    got = written(weight(offloaded(value, tmp_path) if where == "file" else value), target, tmp_path)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


def test_a_weight_that_is_not_contiguous_is_written_row_major(tmp_path):
    value = torch.arange(12.0).reshape(3, 4).t()
    np.testing.assert_array_equal(written(weight(value), F32, tmp_path), value.numpy())


def test_integers_keep_their_type_in_any_archive(tmp_path):
    value = torch.arange(6).reshape(2, 3)
    got = written(weight(value), F16, tmp_path)
    assert got.dtype == np.int64
    np.testing.assert_array_equal(got, value.numpy())


def test_a_constant_in_f32_stays_f32_in_an_f16_archive_and_may_hold_infinities(tmp_path):
    value = torch.tensor([1.0, float("-inf"), 1e30])
    got = written(weight(value, finite=False), F16, tmp_path)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, value.numpy())


def test_a_scalar_and_an_empty_weight_are_written(tmp_path):
    assert written(weight(torch.tensor(2.5)), F32, tmp_path) == 2.5
    assert written(weight(torch.zeros(0, 4)), F32, tmp_path).shape == (0, 4)


def test_packed_bytes_are_written_as_they_are(tmp_path):
    packed = QTensorTractScaleOnly.quantize(torch.randn(8, 64))
    got = written(weight(packed, format="q4_0"), F16, tmp_path)
    np.testing.assert_array_equal(got, packed.to_base_tensor().numpy())
    blocks = packed.to_offload_state()["tensors"]["q4_0"].numpy().tobytes()
    assert (tmp_path / "w.dat").read_bytes()[HEADER_NBYTES:] == blocks


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_transposed_weight_is_written_the_way_it_is_stored(where, tmp_path):
    packed = QTensorTractScaleOnly.quantize(torch.randn(8, 64))
    turned = TransposedTensor.over(packed)
    value = OffloadedTensor.from_original_tensor(turned, "layer.weight") if where == "disk" else turned
    got = written(weight(value, format="q4_0", shape=(8, 64)), F32, tmp_path)
    np.testing.assert_array_equal(got, packed.to_base_tensor().numpy())


def test_an_offloaded_packed_weight_is_written_from_its_state(tmp_path):
    packed = QTensorTractScaleOnly.quantize(torch.randn(8, 64))
    value = OffloadedTensor.from_original_tensor(packed, "layer.weight")
    got = written(weight(value, format="q4_0"), F32, tmp_path)
    np.testing.assert_array_equal(got, packed.to_base_tensor().numpy())


@pytest.mark.parametrize("target", [F32, F16], ids=lambda t: t.dtype)
def test_a_packed_weight_that_has_to_be_dense_is_written_with_its_exact_values(target, tmp_path):
    packed = QTensorTractScaleOnly.quantize(torch.randn(8, 64))
    got = written(weight(packed), target, tmp_path)
    np.testing.assert_array_equal(got, packed.to_base_tensor().numpy().astype(got.dtype))


@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantizing_while_exporting_gives_the_blocks_of_quantizing_at_once(where, dtype, tmp_path):
    # More than one group of rows: 8 MiB hold 32768 rows of 64 f32 values.
    value = torch.randn(40_000, 64).to(dtype)
    choice = Choice(format=QTensorTractScaleOnly)
    source = offloaded(value, tmp_path) if where == "file" else value
    written(weight(source, format="q4_0", quantize_as=choice), F32, tmp_path)
    blocks = QTensorTractScaleOnly.quantize(value).to_offload_state()["tensors"]["q4_0"].numpy().tobytes()
    assert (tmp_path / "w.dat").read_bytes()[HEADER_NBYTES:] == blocks


def test_quantizing_a_transposed_weight_while_exporting_turns_it_first(tmp_path):
    value = torch.randn(64, 8)
    choice = Choice(format=QTensorTractScaleOnly, transposed=True)
    got = written(weight(value, format="q4_0", quantize_as=choice, shape=(8, 64)), F32, tmp_path)
    expected = QTensorTractScaleOnly.quantize(value.t().contiguous()).to_base_tensor().numpy()
    np.testing.assert_array_equal(got, expected)


class Halves(OpaqueTensor, SupportsOffloadState):
    """A class of somebody else: it keeps half of each value, and writes its own file."""

    OFFLOAD_STATE_TAG = "tests_export.halves.v1"

    @classmethod
    def over(cls, half):
        result = cls._shell(half.shape, half.dtype, half.device)
        result.half = half
        return result

    def _parts(self):
        return {"half": self.half}

    def _rebuild(self, parts, dtype):
        return self.over(parts["half"].to(dtype))

    def _to_base_tensor(self):
        return self.half * 2

    def to_offload_state(self):
        return OffloadState(tag=self.OFFLOAD_STATE_TAG, tensors={"half": self.half}, meta={})

    @classmethod
    def from_offload_state(cls, state, target_device=None):
        return cls.over(state["tensors"]["half"])


def test_a_class_without_a_block_format_is_written_dense_in_the_dtype_of_the_archive(tmp_path):
    got = written(weight(Halves.over(torch.tensor([[1.0, 2.0]]))), F16, tmp_path)
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, [[2.0, 4.0]])


def test_a_class_that_writes_its_own_file_is_asked_to(tmp_path, monkeypatch):
    calls = []

    def write(cls, state, dirpath, label, inference_target=None):
        calls.append(inference_target)
        write_dat(dirpath / f"{label}.dat", cls.dat_payload(state, inference_target))

    monkeypatch.setattr(Halves, "write_offload_state_in_file", classmethod(write))
    got = written(weight(Halves.over(torch.tensor([[1.0, 2.0]]))), F32, tmp_path)
    np.testing.assert_array_equal(got, [[2.0, 4.0]])
    assert calls == [F32]


def test_a_class_that_writes_no_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(Halves, "write_offload_state_in_file", classmethod(lambda *_: None))
    with pytest.raises(FormatError, match=r"Halves was asked to write weight\.dat for weight 'layer\.weight'"):
        written(weight(Halves.over(torch.ones(1, 2))), F32, tmp_path)


def test_a_class_that_writes_another_shape_than_the_graph_has_is_refused(tmp_path):
    with pytest.raises(FormatError, match=r"shape \[1, 2\].*expects shape \[2, 1\]"):
        written(weight(Halves.over(torch.ones(1, 2)), shape=(2, 1)), F32, tmp_path)


@pytest.mark.parametrize("where", ["memory", "file"])
def test_nan_is_refused_by_name(where, tmp_path):
    value = torch.ones(4, 4)
    value[2, 3] = float("nan")
    with pytest.raises(QuantizationError, match=r"'layer\.weight' holds NaN"):
        written(weight(offloaded(value, tmp_path) if where == "file" else value), F32, tmp_path)


def test_nan_is_refused_by_name_when_quantizing_while_exporting(tmp_path):
    value = torch.ones(4, 32)
    value[2, 3] = float("nan")
    with pytest.raises(QuantizationError, match=r"layer\.weight"):
        written(weight(value, format="q4_0", quantize_as=Choice(format=QTensorTractScaleOnly)), F32, tmp_path)


@pytest.mark.parametrize("value", [65520.0, -1e6], ids=str)
def test_a_value_that_f16_cannot_hold_is_refused_by_name(value, tmp_path):
    with pytest.raises(QuantizationError, match=r"'layer\.weight' holds a value beyond 65504"):
        written(weight(torch.tensor([1.0, value])), F16, tmp_path)


def test_the_largest_value_of_f16_is_written(tmp_path):
    assert written(weight(torch.tensor([65504.0])), F16, tmp_path) == [65504.0]


def test_each_value_of_bf16_that_f16_can_hold_is_rounded_once(tmp_path):
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.float().abs() < 65520].repeat(20)  # more than are cast at once
    plan = plan_weight(weight(values), F16)
    stored = b"".join(map(bytes, plan.open(tmp_path).chunks()))
    expected = values.float().numpy().astype("<f2")
    assert stored == expected.tobytes()


def test_a_payload_of_4_gib_is_refused_by_name_without_reading_it():
    value = torch.empty(1, dtype=torch.float32).expand(1 << 15, 1 << 15)
    with pytest.raises(FormatError, match=r"'layer\.weight' takes 4294967296 bytes, and a \.dat file holds less"):
        plan_weight(weight(value), F32)
    assert plan_weight(weight(value), F16).nbytes == (1 << 31) + HEADER_NBYTES


def test_rank_nine_is_refused_by_name():
    with pytest.raises(FormatError, match=r"'layer\.weight' has rank 9"):
        plan_weight(weight(torch.zeros([1] * 9)), F32)


def test_a_plan_knows_headers_without_writing_and_counts_by_format(tmp_path):
    packed = QTensorTractScaleOnly.quantize(torch.randn(8, 64))
    plans = [
        plan_weight(weight(torch.zeros(2, 3)), F32),
        plan_weight(weight(torch.zeros(5)), F32),
        plan_weight(weight(packed, format="q4_0"), F32),
    ]
    assert total_by_format(plans) == {"f32": (2, 2 * 128 + 44), "q4_0": (1, 128 + 8 * 2 * 18)}


_RSS = """
import json, resource, sys
from pathlib import Path
import torch
from t2n_hf.contract import InferenceTarget
from t2n_hf.export.weights import Weight, plan_weight
from t2n_hf.nnef.archive import ArchiveWriter
from t2n_hf.store.checkpoint import CheckpointIndex
from t2n_hf.tensor.offload import OffloadedTensor

torch.set_num_threads(1)
folder, dtype = Path(sys.argv[1]), sys.argv[2]
def vm(key):
    for line in open("/proc/self/status"):
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
index = CheckpointIndex.open(folder)
def put(name, out):
    span = index[name]
    value = OffloadedTensor.from_byte_range(span, name)
    plan = plan_weight(Weight(label="w", name=name, value=value, shape=span.shape), InferenceTarget(dtype=dtype))
    with ArchiveWriter(folder / out, "tgz") as archive:
        archive.add_dat("w", plan.open(folder))
put("small", "small.tgz")  # imports, threads and buffers of a first write
before = vm("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
put("large", "large.tgz")
print(json.dumps([before, vm("VmHWM")]))
"""


@pytest.mark.parametrize(
    ("held", "target"), [("float32", "f32"), ("bfloat16", "f32"), ("float32", "f16"), ("bfloat16", "f16")], ids=str
)
def test_writing_a_weight_of_64_mb_takes_less_than_two_chunks(held, target, tmp_path):
    dtype = getattr(torch, held)
    rows = (64 << 20) // dtype.itemsize // 1024
    save_file(
        {"small": torch.ones(64, 64, dtype=dtype), "large": torch.ones(rows, 1024, dtype=dtype)},
        tmp_path / "model.safetensors",
    )
    command = [sys.executable, "-c", _RSS, str(tmp_path), target]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, peak = json.loads(done.stdout)
    assert peak - before < 2 * (8 << 20)


def test_the_header_that_is_planned_is_the_one_that_is_written(tmp_path):
    planned = plan_weight(weight(torch.randn(3, 5)), F32)
    written(weight(torch.randn(3, 5)), F32, tmp_path)
    assert read_header(tmp_path / "w.dat") == planned.header
