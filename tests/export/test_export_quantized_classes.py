"""What an export makes of each quantized class, run in tract: blocks where tract takes them, else dense values."""

import platform

import models
import numpy as np
import pytest
import torch

from t2n_hf import T2NConfig
from t2n_hf.contract import InferenceTarget
from t2n_hf.errors import TractError
from t2n_hf.export import export_nnef
from t2n_hf.nnef.archive import ArchiveReader, ArchiveWriter
from t2n_hf.nnef.dat import Payload
from t2n_hf.nnef.ir import Assign, Document, External, Name, Variable
from t2n_hf.nnef.text import to_text
from t2n_hf.store.manifest import ExportManifest
from t2n_hf.tensor import QTensorTractScaleOnly
from t2n_hf.tensor.quant import QTensorTractQ81
from t2n_hf.tract.runner import TractRunner

pytestmark = pytest.mark.tract


def exported(source, tmp_path, dtype=torch.float32, archive_dtype=None, **options):
    """Quantize on load and export, checked in tract; give formats by label, reasons by name, and the manifest."""
    folder = models.saved(source, tmp_path)
    packed = type(source).from_pretrained(folder, dtype=dtype, quantization_config=T2NConfig(**options)).eval()
    report = export_nnef(packed, tmp_path / "out", dtype=archive_dtype)
    assert report.check == "passed"
    reader = ArchiveReader(report.archive)
    labels = [name.removesuffix(".dat") for name in reader.names() if name.endswith(".dat")]
    manifest = ExportManifest.read(tmp_path / "out")
    reasons = {entry["name"]: entry["reason"] for entry in manifest.dense}
    return {label: reader.header(label).format for label in labels}, reasons, manifest


@pytest.mark.parametrize("archive_dtype", ["f32", "f16"])
def test_embeddings_in_q8_1_are_gathered_beside_q4_0_matrices(archive_dtype, tmp_path):
    formats, reasons, manifest = exported(
        models.m2(), tmp_path, torch.bfloat16, archive_dtype, weights="q4_0", embeddings="q8_1"
    )
    assert formats["model.embed_tokens.weight"] == "q8_1"
    assert sum(found == "q4_0" for found in formats.values()) == 14
    assert list(reasons) == ["lm_head.weight"]
    assert manifest.weights == "q4_0"


def test_matrices_in_q8_1_are_dense_with_the_reason(tmp_path):
    formats, reasons, _ = exported(models.m2(), tmp_path, torch.bfloat16, weights="q8_1")
    assert set(formats.values()) == {"f32"}
    matrices = [name for name in reasons if ".layers." in name]
    assert len(matrices) == 14
    for name in matrices:
        assert reasons[name].endswith("multiplies by it; tract only gathers rows of q8_1")


def test_a_tied_table_in_q8_1_is_dense_as_the_head_multiplies_by_it(tmp_path):
    formats, reasons, _ = exported(models.m1(), tmp_path, weights="none", embeddings="q8_1")
    assert set(formats.values()) == {"f32"}
    assert "lm_head multiplies by it" in reasons["model.embed_tokens.weight"]


def test_experts_in_q8_1_are_gathered(tmp_path):
    formats, _, _ = exported(models.m4(), tmp_path, weights="q8_1")
    assert {label.rpartition(".")[2] for label, found in formats.items() if found == "q8_1"} == {
        "down_proj",
        "gate_up_proj",
    }


def test_ternary_weights_are_dense_with_the_reason(tmp_path):
    formats, reasons, _ = exported(models.m2(), tmp_path, torch.bfloat16, weights="ternary", embeddings="ternary")
    assert set(formats.values()) == {"f32"}
    assert reasons["model.embed_tokens.weight"] == "t2n_hf.ternary.v1 has no block format that tract reads"
    assert len(reasons) == 16


# ---- what tract itself does with the blocks -----------------------------------------------------------------------


def archive(path, operation: Assign, given: External, payload: Payload):
    document = Document(
        inputs=(given,),
        outputs=("y",),
        variables=(Variable("w", "w", payload.header.shape),),
        body=(operation,),
        extensions=("tract_registry tract_transformers",),
    )
    with ArchiveWriter(path, "tgz", level=0) as writer:
        writer.add_text("graph.nnef", to_text(document))
        writer.add_dat("w", payload)
    return path


def payload_of(weight) -> Payload:
    return type(weight).dat_payload(weight.to_offload_state(), InferenceTarget())


@pytest.mark.skipif(platform.machine().lower().startswith(("arm", "aarch64")), reason="there it decompresses in f16")
@pytest.mark.parametrize("kind", [QTensorTractScaleOnly, QTensorTractQ81])
def test_tract_gathers_the_values_that_we_compute(kind, tmp_path):
    weight = kind.quantize(torch.randn(48, 64, generator=torch.Generator().manual_seed(0)))
    gather = Assign(("y",), "tract_core_gather", (Name("w"), Name("x")), {"axis": 0, "datum_type": "f32"})
    path = archive(tmp_path / "g.nnef.tgz", gather, External("x", "i64", (48,)), payload_of(weight))
    with TractRunner(path, timeout_s=60) as runner:
        found = runner.run({"x": np.arange(48)})["y"]
    np.testing.assert_array_equal(found, weight.to_base_tensor().numpy())
    np.testing.assert_array_equal(found, weight.decompress().numpy())


def test_tract_has_no_product_with_q8_1(tmp_path):
    weight = QTensorTractQ81.quantize(torch.randn(48, 64, generator=torch.Generator().manual_seed(0)))
    product = Assign(("y",), "matmul", (Name("x"), Name("w")), {"transposeB": True})
    path = archive(tmp_path / "m.nnef.tgz", product, External("x", "f32", (5, 64)), payload_of(weight))
    with pytest.raises(TractError), TractRunner(path, timeout_s=60) as runner:
        runner.run({"x": np.zeros((5, 64), np.float32)})
