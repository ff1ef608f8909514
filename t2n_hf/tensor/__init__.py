"""Tensors that keep their values packed or on disk, and bounded memory for them.

`opaque` is what all of them are: `wrapper` has the class, with `aten_rules`, `autograd`, `compute`, `fallback` and
`flatten`. `quant` holds the packed formats, `transposed` turns one. `offload` leaves values on disk: `source_tensor`
reads them (`rows`: some of them; `eager`: outside of compiled graphs) from a source (`stored`) over values at rest
(`contents`), `persist` writes; `residency` holds them in memory within a budget. `named`, `ref` (with `trace_op` and
`traced_view`) and `updater` are for code that was written for torch_to_nnef: nothing else in this package uses them.
"""

from t2n_hf.tensor.named import NamedTensor, apply_name_to_tensor_in_module
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.opaque import (
    OpaqueTensor,
    OpaqueTensorRef,
    SupportsOffloadState,
    find_opaque_ref_by_py_id,
    opaque_to_final_tensor,
    resolve_offload_state,
    set_opaque_tensor_in_params_as_ref,
    trace_tensor_device_for_func,
)
from t2n_hf.tensor.quant.q4_0 import QTensorTractScaleOnly
from t2n_hf.tensor.quant.qtensor import QTensor, QTensorTract
from t2n_hf.tensor.quant.scheme import QScalePerGroupF16
from t2n_hf.tensor.residency import (
    ResidencyStrategy,
    TensorPrefetch,
    TensorResidencyLease,
    TensorResidencyPool,
)

__all__ = [
    "NamedTensor",
    "OffloadedTensor",
    "OpaqueTensor",
    "OpaqueTensorRef",
    "QScalePerGroupF16",
    "QTensor",
    "QTensorTract",
    "QTensorTractScaleOnly",
    "ResidencyStrategy",
    "SupportsOffloadState",
    "TensorPrefetch",
    "TensorResidencyLease",
    "TensorResidencyPool",
    "apply_name_to_tensor_in_module",
    "find_opaque_ref_by_py_id",
    "opaque_to_final_tensor",
    "resolve_offload_state",
    "set_opaque_tensor_in_params_as_ref",
    "trace_tensor_device_for_func",
]
