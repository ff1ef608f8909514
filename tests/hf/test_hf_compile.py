"""torch.compile of models with weights on disk: their leases and reads run between the graphs, not in them."""

import models
import pytest
import torch

from t2n_hf import T2NConfig
from t2n_hf.hf.hooks import leases_of


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("weights", ["none", "q4_0"])
def test_a_model_with_weights_on_disk_computes_the_same_compiled(weights, tmp_path):
    source = models.m2(num_hidden_layers=1)
    model = type(source).from_pretrained(
        models.saved(source, tmp_path), quantization_config=T2NConfig(weights), device_map={"": "disk"}
    )
    with torch.no_grad():
        expected = model(models.prompt()).logits
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            assert torch.equal(compiled(models.prompt()).logits, expected)
        assert torch.equal(model(models.prompt()).logits, expected)
    assert leases_of(model).pool.lease_count == 0
