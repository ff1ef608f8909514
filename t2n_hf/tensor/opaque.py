"""Opaque tensors as their users see them: the class, how it is expanded, kept and traced, under one name.

The class itself is in `wrapper`, what stands for it in a trace in `ref`.
"""

from t2n_hf.contract import SupportsOffloadState
from t2n_hf.registry import resolve_offload_state
from t2n_hf.tensor.compute import compute_mode, overriding_compute
from t2n_hf.tensor.fallback import materialise, materialised_counts
from t2n_hf.tensor.ref import (
    OpaqueTensorRef,
    find_opaque_ref_by_py_id,
    set_opaque_tensor_in_params_as_ref,
    trace_tensor_device_for_func,
)
from t2n_hf.tensor.wrapper import OpaqueTensor, opaque_to_final_tensor

__all__ = [
    "OpaqueTensor",
    "OpaqueTensorRef",
    "SupportsOffloadState",
    "compute_mode",
    "find_opaque_ref_by_py_id",
    "materialise",
    "materialised_counts",
    "opaque_to_final_tensor",
    "overriding_compute",
    "resolve_offload_state",
    "set_opaque_tensor_in_params_as_ref",
    "trace_tensor_device_for_func",
]
