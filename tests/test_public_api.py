"""Names are public by list: whoever changes a list edits it here too, on purpose, with a line in the changelog."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import t2n_hf

PUBLIC = {
    "t2n_hf": {
        "Importance",
        "T2NConfig",
        "TractModelForCausalLM",
        "TractModelForImageTextToText",
        "TractModelForSeq2SeqLM",
        "calibrate",
        "dispatch_model",
        "export_nnef",
        "load_checkpoint_and_dispatch",
        "materialize",
        "plan_placement",
        "pull_nnef_from_hub",
        "push_nnef_to_hub",
        "quantize_checkpoint",
    },
    "t2n_hf.contract": {
        "COMPUTE_MODES",
        "ENTRY_POINT_GROUP",
        "InferenceTarget",
        "OffloadState",
        "SupportsOffloadState",
        "Tag",
        "WeightFormat",
        "defined_classes",
        "dense_chunks",
    },
    "t2n_hf.tensor": {
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
    },
    "t2n_hf.tensor.quant": {
        "BitPacking",
        "QScalePerGroupF16",
        "QScheme",
        "QTensor",
        "QTensorTract",
        "QTensorTractQ81",
        "QTensorTractScaleOnly",
        "TernaryTensor",
        "U8Compressor",
        "ZlibCompression",
        "fp_to_tract_q4_0_with_min_max_calibration",
        "qscale_per_group_f16_min_max_calibration",
    },
    "t2n_hf.trace": {
        "DispatchTracer",
        "PythonTensor",
        "choose_kwargs_for_dynamic_shapes",
        "deserialize_args",
        "deserialize_args_kwargs",
        "dispatch_trace",
        "extract_names_from_schema",
        "make_copy",
        "serialize_args",
        "serialize_one",
        "tree_spec_as_name",
        "tree_spec_from_name",
        "type_as_str_with_info",
    },
    "t2n_hf.testing": {
        "EmitterConformance",
        "ModelConformance",
        "RewriteConformance",
        "SeamCase",
        "WeightFormatConformance",
    },
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_those_of_the_list(module):
    loaded = importlib.import_module(module)
    assert set(loaded.__all__) == PUBLIC[module]
    missing = [name for name in loaded.__all__ if not hasattr(loaded, name)]
    assert not missing


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_function_and_class_has_a_docstring(module):
    loaded = importlib.import_module(module)
    objects = {name: getattr(loaded, name) for name in PUBLIC[module]}
    bare = [name for name, value in objects.items() if callable(value) and not value.__doc__]
    assert not bare


def test_every_module_that_defines_something_lists_its_names():
    bare = []
    for path in sorted(Path(t2n_hf.__file__).parent.rglob("*.py")):
        body = ast.parse(path.read_text()).body
        assigned = {name for node in body for name in _assigned(node)}
        only_a_docstring = len(body) == 1
        if not only_a_docstring and path.name not in ("worker.py", "__main__.py") and "__all__" not in assigned:
            bare.append(str(path))
    assert not bare


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_importing_the_package_changes_nothing_foreign_and_runs_no_plugin():
    program = """
import sys, torch, transformers, safetensors.torch, accelerate
before = {(m, k): id(v) for m in (torch, torch.nn.functional, torch.Tensor, safetensors.torch, accelerate)
          for k, v in vars(m).items()}
import t2n_hf
after = {(m, k): id(v) for m in (torch, torch.nn.functional, torch.Tensor, safetensors.torch, accelerate)
         for k, v in vars(m).items()}
changed = [key for key in before if before[key] != after.get(key)]
assert not changed, changed
plugins = {name for name in sys.modules if name.startswith("t2n_hf_")} - {"t2n_hf_command"}
assert not plugins, "a plugin was imported"
assert "tract" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
