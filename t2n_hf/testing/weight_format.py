"""What is asked of one quantized tensor."""
# ruff: noqa: D102 - names of tests are sentences

import copy
import json
import threading
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import set_module_tensor_to_device
from torch import nn

from t2n_hf.contract import COMPUTE_MODES, ENTRY_POINT_GROUP, InferenceTarget, Tag, WeightFormat
from t2n_hf.errors import ConfigError, FormatError, InPlaceError, QuantizationError, UnsupportedOpError
from t2n_hf.nnef.dat import read_dat
from t2n_hf.registry import class_of_tag, format_class, resolve_offload_state
from t2n_hf.store.state import read_state, write_state
from t2n_hf.tensor.compute import compute_mode
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.opaque import OpaqueTensor, opaque_to_final_tensor

__all__ = ["DTYPES", "NAME", "WeightFormatConformance"]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAME = "model.layers.0.mlp.down_proj.weight"


def _set_row(weight: torch.Tensor, zeros: torch.Tensor) -> None:
    weight[0] = 0


# Ways to write to a weight, or to a view of it.
_WRITES: Final[dict[str, Callable[[torch.Tensor, torch.Tensor], Any]]] = {
    "copy_": lambda weight, zeros: weight.copy_(zeros),
    "mul_": lambda weight, zeros: weight.mul_(2),
    "zero_": lambda weight, zeros: weight.zero_(),
    "set_": lambda weight, zeros: weight.set_(zeros),  # type: ignore[call-overload]
    "data.mul_": lambda weight, zeros: weight.data.mul_(2),
    "init.normal_": lambda weight, zeros: nn.init.normal_(weight),
    "out": lambda weight, zeros: torch.add(zeros, 1, out=weight),
    "foreach_mul_": lambda weight, zeros: torch._foreach_mul_([weight], 2.0),
    "setitem": _set_row,
    "row": lambda weight, zeros: weight[0].fill_(1),
    "view": lambda weight, zeros: weight.view(-1).zero_(),
    "transposed": lambda weight, zeros: weight.t().mul_(2),
}


class WeightFormatConformance:
    """Tests of one class by itself. Set `weight_format`; override the rest where the format differs.

    `max_relative_error` bounds |values - floats| / |floats| over a matrix of normal random numbers, in the 2-norm;
    `max_fast_error` bounds a fast product against the exact one, in the same way. `shape` is one that the class takes.
    """

    weight_format: ClassVar[type[WeightFormat]]
    shape: ClassVar[tuple[int, int]] = (96, 128)
    max_relative_error: ClassVar[float] = 0.2
    max_fast_error: ClassVar[float] = 0.01

    def floats(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A matrix of `shape`, normal random numbers from a fixed seed."""
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(0)).to(dtype)

    def weight(self, dtype: torch.dtype = torch.float32) -> Any:  # noqa: ANN401 - an instance of the class under test
        """The same matrix, quantized, as a parameter."""
        return nn.Parameter(self.weight_format.quantize(self.floats(dtype), name=NAME), requires_grad=False)

    def inputs(self, dtype: torch.dtype = torch.float32, rows: int = 5) -> torch.Tensor:
        """Inputs of a product with the matrix: (2, rows, K)."""
        return torch.randn(2, rows, self.shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)

    # ---- who it is ------------------------------------------------------------------------------------------------

    def test_the_tag_is_well_formed_and_finds_the_class(self) -> None:
        tag = self.weight_format.OFFLOAD_STATE_TAG
        parsed = Tag.parse(tag)
        assert class_of_tag(tag) is self.weight_format
        assert format_class(tag) is self.weight_format
        assert format_class(parsed.short) is self.weight_format
        assert issubclass(self.weight_format, OpaqueTensor)

    def test_an_entry_point_declares_the_tag(self) -> None:
        declared = [p.load() for p in entry_points(group=ENTRY_POINT_GROUP, name=self.weight_format.OFFLOAD_STATE_TAG)]
        assert self.weight_format in declared

    # ---- quantizing -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_quantizing_keeps_shape_dtype_and_name_and_leaves_the_source_alone(self, dtype: torch.dtype) -> None:
        source = self.floats(dtype)
        before = source.clone()
        result: Any = self.weight_format.quantize(source, name=NAME)
        assert torch.equal(source, before)
        assert (type(result), result.shape, result.dtype) == (self.weight_format, source.shape, dtype)
        assert result.name == NAME
        assert not result.requires_grad
        error = (result.to_base_tensor().float() - source.float()).norm() / source.float().norm()
        assert error <= self.max_relative_error

    def test_the_dtype_that_it_acts_as_can_be_chosen(self) -> None:
        result = self.weight_format.quantize(self.floats(), dtype=torch.bfloat16)
        assert result.dtype == torch.bfloat16
        assert result.to_base_tensor().dtype == torch.bfloat16  # type: ignore[attr-defined]

    def test_the_importance_of_channels_changes_no_layout(self) -> None:
        plain: Any = self.weight_format.quantize(self.floats(), name=NAME)
        importance = torch.linspace(0.01, 10, self.shape[1])
        before = importance.clone()
        for given in (importance, torch.ones(self.shape[1]), torch.zeros(self.shape[1])):
            weighted: Any = self.weight_format.quantize(self.floats(), name=NAME, importance=given)
            error = (weighted.to_base_tensor() - self.floats()).norm() / self.floats().norm()
            assert error <= 1.5 * self.max_relative_error
            parts, expected = (w.to_offload_state()["tensors"] for w in (weighted, plain))
            found = {key: (part.dtype, part.shape) for key, part in parts.items()}
            assert found == {key: (part.dtype, part.shape) for key, part in expected.items()}
        assert torch.equal(importance, before)

    def test_zeros_stay_zero(self) -> None:
        source = self.floats()
        source[0] = 0
        source[1] *= 1e-12
        source[2] *= 1e-8
        values = self.weight_format.quantize(source).to_base_tensor()  # type: ignore[attr-defined]
        assert torch.equal(values[0], torch.zeros_like(values[0]))
        assert bool(torch.isfinite(values).all())

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
    def test_values_that_are_not_finite_are_refused_by_name(self, bad: float) -> None:
        source = self.floats()
        source[3, 5] = bad
        with pytest.raises(QuantizationError, match=NAME.replace(".", r"\.")):
            self.weight_format.quantize(source, name=NAME)

    def test_what_it_refuses_it_does_not_quantize(self) -> None:
        assert self.weight_format.refuses(self.shape, torch.float32) is None
        assert self.weight_format.refuses(self.shape, torch.int64)
        for shape in [(64, 48), (64, 1), (7,), (3, 5, 32), (2, 64, 64)]:
            reason = self.weight_format.refuses(shape, torch.float32)
            if reason is None:
                assert tuple(self.weight_format.quantize(torch.randn(shape)).shape) == shape
            else:
                with pytest.raises(QuantizationError):
                    self.weight_format.quantize(torch.randn(shape))

    def test_a_stack_of_matrices_is_each_of_them(self) -> None:
        stack = torch.stack([self.floats(), self.floats() * 2, -self.floats()])
        if self.weight_format.refuses(tuple(stack.shape), stack.dtype) is not None:
            return
        packed: Any = self.weight_format.quantize(stack, name=NAME)
        for item, values in enumerate(stack):
            alone: Any = self.weight_format.quantize(values, name=NAME)
            assert torch.equal(opaque_to_final_tensor(packed[item]), alone.to_base_tensor())

    def test_the_planned_size_is_the_size_at_rest(self) -> None:
        weight = self.weight()
        planned = self.weight_format.packed_nbytes(self.shape)
        assert sum(part.nbytes for part in weight.to_offload_state()["tensors"].values()) == planned
        assert weight.opaque_nbytes == self.weight_format.resident_nbytes(self.shape, "exact") == planned
        assert weight.nbytes == self.floats().nbytes

    @pytest.mark.parametrize("compute", COMPUTE_MODES)
    def test_the_planned_size_is_the_size_in_memory(self, compute: str) -> None:
        weight = self.weight().with_compute(compute)
        F.linear(self.inputs(), weight)
        assert weight.opaque_nbytes == self.weight_format.resident_nbytes(self.shape, compute)
        with pytest.raises(ConfigError, match="compute"):
            weight.with_compute("roughly")

    # ---- state ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_the_state_survives_a_file(self, dtype: torch.dtype, tmp_path: Path) -> None:
        weight = self.weight(dtype)
        state = weight.to_offload_state()
        assert state["tag"] == self.weight_format.OFFLOAD_STATE_TAG
        assert json.loads(json.dumps(state["meta"])) == state["meta"]
        assert all(key.isidentifier() and type(part) is torch.Tensor for key, part in state["tensors"].items())
        write_state(tmp_path / "state.safetensors", state)
        stored: Any = read_state(tmp_path / "state.safetensors")
        assert resolve_offload_state(stored) is self.weight_format
        again: Any = self.weight_format.from_offload_state(stored, "cpu")
        assert (again.shape, again.dtype) == (weight.shape, weight.dtype)
        assert torch.equal(again.to_base_tensor(), weight.to_base_tensor())
        second = again.to_offload_state()
        assert second["meta"] == state["meta"]
        assert all(torch.equal(second["tensors"][key], part) for key, part in state["tensors"].items())

    def test_rows_that_its_state_can_be_cut_to_are_its_rows(self) -> None:
        for shape in (self.shape, (3, *self.shape)):
            floats = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            if self.weight_format.refuses(shape, floats.dtype) is not None:
                continue
            whole: Any = self.weight_format.quantize(floats, name=NAME)
            state = whole.to_offload_state()
            names = self.weight_format.row_parts(state["meta"], shape)
            assert names <= state["tensors"].keys()
            if not names:
                continue  # optional: every row needs the whole state then
            rows = torch.tensor([0, 2])
            cut = {key: part[rows] if key in names else part for key, part in state["tensors"].items()}
            some: Any = self.weight_format.from_offload_state({**state, "tensors": cut})  # type: ignore[typeddict-item]
            assert some.shape == (2, *shape[1:])
            assert torch.equal(some.to_base_tensor(), whole.to_base_tensor()[rows])

    def test_a_state_without_its_parts_is_refused(self) -> None:
        state = self.weight().to_offload_state()
        with pytest.raises(FormatError):
            self.weight_format.from_offload_state({"tag": state["tag"], "tensors": {}, "meta": state["meta"]})

    def test_it_is_not_pickled(self) -> None:
        with pytest.raises(UnsupportedOpError, match="pickle"):
            self.weight().__reduce_ex__(2)

    def test_its_dat_file_holds_its_values(self, tmp_path: Path) -> None:
        weight = self.weight()
        state = weight.to_offload_state()
        self.weight_format.write_offload_state_in_file(state, tmp_path, "weight", InferenceTarget(dtype="f32"))
        values = torch.from_numpy(read_dat(tmp_path / "weight.dat"))
        assert torch.equal(values, weight.to_base_tensor())

    # ---- computing ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_products_are_those_of_the_dense_values(self, dtype: torch.dtype) -> None:
        weight, x = self.weight(dtype), self.inputs(dtype)
        dense = weight.to_base_tensor()
        bias = torch.linspace(-1, 1, self.shape[0], dtype=dtype)
        with compute_mode("exact"):
            for left, right in [
                (F.linear(x, weight, bias), F.linear(x, dense, bias)),
                (F.linear(x[0, 0], weight), F.linear(x[0, 0], dense)),
                (x @ weight.T, x @ dense.T),
                (x[0] @ weight.t(), x[0] @ dense.t()),
                (weight * 2, dense * 2),
            ]:
                torch.testing.assert_close(left, right)

    def test_rows_are_those_of_the_dense_values(self) -> None:
        weight = self.weight()
        dense = weight.to_base_tensor()
        ids = torch.tensor([[0, 5, self.shape[0] - 1], [1, 1, 2]])
        for left, right in [
            (F.embedding(ids, weight), F.embedding(ids, dense)),
            (weight[3], dense[3]),
            (weight[-1], dense[-1]),
            (weight[2:7], dense[2:7]),
            (weight[ids], dense[ids]),
            (weight[:, 4], dense[:, 4]),
        ]:
            assert left.shape == right.shape
            assert bool((left == right).all())
        with pytest.raises(IndexError):
            F.embedding(torch.tensor([self.shape[0]]), weight)

    @pytest.mark.parametrize("rows", [1, 5, 100])
    def test_fast_products_are_near_and_leave_the_state_as_it_was(self, rows: int) -> None:
        for dtype in DTYPES:
            weight, x = self.weight(dtype), self.inputs(dtype, rows)
            state = {key: part.clone() for key, part in weight.to_offload_state()["tensors"].items()}
            exact = F.linear(x, weight.to_base_tensor()).float()
            fast_weight = weight.with_compute("fast")
            fast = F.linear(x, fast_weight).float()
            assert fast_weight.opaque_nbytes == self.weight_format.resident_nbytes(self.shape, "fast")
            assert (fast - exact).norm() / exact.norm() <= self.max_fast_error
            again = weight.to_offload_state()["tensors"]
            assert all(torch.equal(again[key], part) for key, part in state.items())

    def test_gradients_pass_through_to_the_input_and_the_bias(self) -> None:
        weight = self.weight()
        dense = weight.to_base_tensor()
        for other in (weight, weight.with_compute("fast")):
            x, y = (self.inputs().requires_grad_() for _ in range(2))
            bias, twin = (torch.zeros(self.shape[0], requires_grad=True) for _ in range(2))
            F.linear(x, other, bias).square().sum().backward()
            F.linear(y, dense, twin).square().sum().backward()
            for found, expected in ((x.grad, y.grad), (bias.grad, twin.grad)):
                assert found is not None
                assert expected is not None
                assert (found - expected).norm() / expected.norm() <= 2 * self.max_fast_error

    def test_threads_agree(self) -> None:
        weight, x = self.weight().with_compute("fast"), self.inputs()
        results: list[torch.Tensor] = []
        threads = [threading.Thread(target=lambda: results.append(F.linear(x, weight))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 4
        assert all(torch.equal(results[0], result) for result in results)

    # ---- being a parameter ----------------------------------------------------------------------------------------

    def test_it_is_a_parameter_that_can_be_copied_moved_and_loaded(self) -> None:
        layer = nn.Linear(self.shape[1], self.shape[0], bias=False)
        layer.weight = weight = self.weight()
        assert isinstance(weight, nn.Parameter)
        twin = copy.deepcopy(layer)
        assert twin.weight is not weight
        other = nn.Linear(self.shape[1], self.shape[0], bias=False)
        other.load_state_dict(layer.state_dict(), assign=True)
        half = copy.deepcopy(layer).to(torch.bfloat16)
        results: list[Any] = [twin.weight, other.weight, half.weight]
        for found in results:
            assert found.name == NAME
            assert type(found) is self.weight_format
            assert isinstance(found, nn.Parameter)
        assert torch.equal(twin.weight, weight)
        assert torch.equal(other.weight, weight)
        assert half.weight.dtype == torch.bfloat16
        assert half(self.inputs(torch.bfloat16)).dtype == torch.bfloat16

    def test_accelerate_can_set_it(self) -> None:
        layer = nn.Linear(self.shape[1], self.shape[0], bias=False)
        layer.weight = self.weight()
        value = layer.state_dict()["weight"]
        expected = layer(self.inputs())
        set_module_tensor_to_device(layer, "weight", "meta")
        assert layer.weight.device.type == "meta"
        set_module_tensor_to_device(layer, "weight", "cpu", value=value)
        assert isinstance(layer.weight, nn.Parameter)
        assert type(layer.weight) is self.weight_format
        assert torch.equal(layer(self.inputs()), expected)

    @pytest.mark.parametrize("way", list(_WRITES))
    def test_no_write_is_lost(self, way: str) -> None:
        weight = self.weight()
        before = weight.to_base_tensor()
        with torch.no_grad(), pytest.raises(InPlaceError, match=NAME.replace(".", r"\.")):
            _WRITES[way](weight, torch.zeros_like(before))
        assert torch.equal(weight.to_base_tensor(), before)

    def test_offloaded_it_is_the_same_and_stays_packed(self) -> None:
        weight, x = self.weight(), self.inputs()
        offloaded = OffloadedTensor.from_original_tensor(weight, NAME)
        assert offloaded.inner_class is self.weight_format
        assert offloaded.nbytes_loaded == weight.opaque_nbytes
        assert torch.equal(F.linear(x, offloaded), F.linear(x, weight))
        assert torch.equal(offloaded[1:4], weight[1:4])
        stored = offloaded.stored_state()
        assert stored is not None
        assert all(torch.equal(stored["tensors"][k], t) for k, t in weight.to_offload_state()["tensors"].items())

    def test_rows_of_an_offloaded_table_are_those_of_the_weight(self) -> None:
        weight = self.weight()
        layer = nn.Embedding(*self.shape)
        layer.weight = nn.Parameter(OffloadedTensor.from_original_tensor(weight, NAME), requires_grad=False)
        ids = torch.tensor([[0, 5, self.shape[0] - 1], [1, 1, 2]])
        expected = F.embedding(ids, weight)
        assert torch.equal(layer(ids), expected)
        assert torch.equal(copy.deepcopy(layer)(ids), expected)
        assert torch.equal(layer.weight[3], weight.to_base_tensor()[3])

    def test_accelerate_can_set_it_when_it_is_offloaded(self) -> None:
        layer = nn.Linear(self.shape[1], self.shape[0], bias=False)
        layer.weight = nn.Parameter(OffloadedTensor.from_original_tensor(self.weight(), NAME), requires_grad=False)
        expected = layer(self.inputs())
        value = layer.state_dict()["weight"]
        set_module_tensor_to_device(layer, "weight", "cpu", value=value)
        assert isinstance(layer.weight, OffloadedTensor)
        assert torch.equal(layer(self.inputs()), expected)
        set_module_tensor_to_device(layer, "weight", "cpu", value=self.weight())
        assert torch.equal(layer(self.inputs()), expected)
