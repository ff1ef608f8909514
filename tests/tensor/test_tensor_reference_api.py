"""The names and signatures that code written for torch_to_nnef's tensors calls, each where that code looks for it."""

import importlib
import inspect

import pytest
import torch

NOTHING = inspect.Parameter.empty
# Name -> its parameters after self and cls, with their defaults; None for what is not called.
NAMED = {
    "NamedTensor": {"fp_tensor": NOTHING, "nnef_name": NOTHING},
    "NamedTensor.data": None,
    "apply_name_to_tensor_in_module": {"model": NOTHING},
}
OFFLOAD = {
    "OffloadedTensor": {
        "elem": NOTHING,
        "device": NOTHING,
        "offload_dir": NOTHING,
        "name": NOTHING,
        "offloaded_tensor_type": NOTHING,
        "force_gc_collect": False,
        "storage_id": None,
    },
    "OffloadedTensor.from_original_tensor": {
        "tensor": NOTHING,
        "name": NOTHING,
        "offload_dir": None,
        "suffix_log_msg": "",
    },
    "OffloadedTensor.reload": {"device": None},
    "OffloadedTensor.set_": {"source": NOTHING, "args": NOTHING, "kwargs": NOTHING},
    "OffloadedTensor.to": None,
    "OffloadedTensor.update_values": {"values": NOTHING, "strict_shape": True, "strict_dtype": True},
    "OffloadedTensor.is_meta": None,
}
OPAQUE = {
    "OpaqueTensor.data": None,
    "OpaqueTensor.to_base_tensor": {},
    "OpaqueTensor.to_trace_tensor": {"device": NOTHING},
    "OpaqueTensorRef": {"meta_tensor": NOTHING, "opaque_tensor": NOTHING},
    "SupportsOffloadState.to_offload_state": {},
    "SupportsOffloadState.from_offload_state": {"state": NOTHING, "target_device": None},
    "SupportsOffloadState.write_offload_state_in_file": {
        "state": NOTHING,
        "dirpath": NOTHING,
        "label": NOTHING,
        "inference_target": None,
    },
    "find_opaque_ref_by_py_id": {"module": NOTHING, "py_id": NOTHING},
    "opaque_to_final_tensor": {"rtensor": NOTHING},
    "resolve_offload_state": {"state": NOTHING},
    "set_opaque_tensor_in_params_as_ref": {"model": NOTHING},
    "trace_tensor_device_for_func": {"func": NOTHING},
}
QUANT = {
    "QScheme.quantize_as_torch": {"fp_tensor": NOTHING},
    "QScheme.quantize_as_u8": {"fp_tensor": NOTHING},
    "QScheme.dequantize": {"u8_tensor": NOTHING, "target_dtype": NOTHING},
    "QScheme.to_device": {"new_device": NOTHING},
    "QScalePerGroupF16": {"group_size": NOTHING, "scale": NOTHING, "n_bits": NOTHING},
    "U8Compressor.compress": {"u8_tensor": NOTHING},
    "U8Compressor.decompress": {"u8_tensor": NOTHING},
    "U8Compressor.to_device": {"new_device": NOTHING},
    "QTensor": {
        "fp_tensor": NOTHING,
        "qscheme": NOTHING,
        "dequant_to_dtype": torch.float32,
        "u8_compressors": None,
    },
    "QTensor.decompress": {},
    "QTensor.decompress_to_u8": {},
    "QTensor.to_device": {"new_device": NOTHING},
    "QTensor.write_in_file": {"dirpath": NOTHING, "label": NOTHING},
    "QTensorTract": None,
    "QTensorTractScaleOnly": {
        "fp_tensor": NOTHING,
        "qscheme": NOTHING,
        "dequant_to_dtype": torch.float32,
        "u8_compressors": None,
        "specific_machine": None,
    },
    "QTensorTractScaleOnly.OFFLOAD_STATE_TAG": None,
    "QTensorTractScaleOnly.decompress": {},
}
RESIDENCY = {
    "ResidencyStrategy.LRU": None,
    "ResidencyStrategy.FIXED": None,
    "TensorPrefetch": {
        "pool": NOTHING,
        "source": NOTHING,
        "device": NOTHING,
        "future": NOTHING,
        "value": None,
    },
    "TensorPrefetch.done": {},
    "TensorPrefetch.wait": {},
    "TensorResidencyLease": {"pool": NOTHING, "source": NOTHING, "device": NOTHING, "mode": NOTHING},
    "TensorResidencyPool": {"max_cached_bytes": None, "max_workers": 1, "strategy": "lru"},
    "TensorResidencyPool.acquire": {"source": NOTHING, "device": None, "mode": "read"},
    "TensorResidencyPool.close": {},
    "TensorResidencyPool.evict": {"source": NOTHING},
    "TensorResidencyPool.flush": {"source": None},
    "TensorResidencyPool.is_pinned": {"source": NOTHING},
    "TensorResidencyPool.is_resident": {"source": NOTHING},
    "TensorResidencyPool.pin": {"source": NOTHING, "device": None},
    "TensorResidencyPool.prefetch": {"source": NOTHING, "device": None},
    "TensorResidencyPool.resident_bytes": None,
    "TensorResidencyPool.resolve": {"source": NOTHING, "device": None},
    "TensorResidencyPool.scope": {"device": None},
    "TensorResidencyPool.unpin": {"source": NOTHING},
}
UPDATER = {
    "ModTensorUpdater": {
        "model": NOTHING,
        "add_parameter_if_unset": True,
        "add_buffers": False,
        "add_unregistred_tensor": False,
        "disable_requires_grad": False,
    },
    "ModTensorUpdater.available_names": None,
    "ModTensorUpdater.get_by_name": {"name": NOTHING},
    "ModTensorUpdater.restore_require_grad": {},
    "ModTensorUpdater.split_param_name": {"name": NOTHING},
    "ModTensorUpdater.update_by_name": {
        "name": NOTHING,
        "new_tensor": NOTHING,
        "tie_replacements": True,
        "enforce_tensor_consistency": True,
    },
    "ModTensorUpdater.update_by_ref": {
        "ref": NOTHING,
        "new_tensor": NOTHING,
        "enforce_tensor_consistency": True,
    },
}
OF_THE_PACKAGE = [
    *("NamedTensor", "OffloadedTensor", "OpaqueTensorRef", "QScalePerGroupF16", "QTensor", "QTensorTractScaleOnly"),
    *("ResidencyStrategy", "TensorPrefetch", "TensorResidencyLease", "TensorResidencyPool"),
    *("apply_name_to_tensor_in_module", "set_opaque_tensor_in_params_as_ref"),
]
MODULES = {
    "named": NAMED,
    "offload": OFFLOAD,
    "opaque": OPAQUE,
    "quant": QUANT,
    "residency": RESIDENCY,
    "updater": UPDATER,
}
CASES = [
    *((f"t2n_hf.tensor.{module}", name, wanted) for module, names in MODULES.items() for name, wanted in names.items()),
    *(
        ("t2n_hf.tensor", name, wanted)
        for names in MODULES.values()
        for name, wanted in names.items()
        if name.partition(".")[0] in OF_THE_PACKAGE
    ),
]


@pytest.mark.parametrize(("module", "name", "wanted"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_each_name_is_there_and_takes_the_same_arguments(module, name, wanted):
    found = importlib.import_module(module)
    for part in name.split("."):
        found = inspect.getattr_static(found, part) if isinstance(found, type) else getattr(found, part)
    found = getattr(found, "__func__", found)
    if wanted is None:
        return
    parameters = [p for p in _signature(found) if p.name not in ("self", "cls")]
    positional = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    shared = [name for name in wanted if name in positional]
    assert positional[: len(shared)] == shared, "in this order"
    ours = {p.name: p for p in parameters}
    assert set(wanted) <= set(ours)
    for parameter, default in wanted.items():
        if default is not NOTHING:
            assert getattr(ours[parameter].default, "value", ours[parameter].default) == default
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    more = [p.name for p in parameters if p.name not in wanted and p.default is NOTHING and p.kind not in variadic]
    assert not more, "what is new has a default"


def _signature(found):
    of_tensor = isinstance(found, type) and issubclass(found, torch.Tensor)
    return list(inspect.signature(found.__new__ if of_tensor else found).parameters.values())


@pytest.mark.parametrize("module", ["t2n_hf.tensor", *(f"t2n_hf.tensor.{module}" for module in MODULES)])
def test_each_name_is_listed_as_public(module):
    names = OF_THE_PACKAGE if module == "t2n_hf.tensor" else MODULES[module.rpartition(".")[2]]
    assert {name.partition(".")[0] for name in names} <= set(importlib.import_module(module).__all__)
