"""Offloaded tensors inside models: accelerate's setter, threads with different inputs, prefetching slow reads."""

import threading
import time

import pytest
import torch
from accelerate.utils import set_module_tensor_to_device
from offload_cases import checkpoint
from safetensors.torch import save_file
from torch import nn

from t2n_hf.errors import StorageError
from t2n_hf.residency import ResidencyStrategy, TensorResidencyPool
from t2n_hf.store.checkpoint import CheckpointFile, CheckpointIndex
from t2n_hf.tensor import OffloadedTensor, QTensorTractScaleOnly

STRATEGIES = list(ResidencyStrategy)


@pytest.fixture
def stored(tmp_path):
    return checkpoint(tmp_path)


def test_accelerate_can_set_and_move_an_offloaded_parameter(stored):
    _, values, index = stored
    module = nn.Linear(64, 24)
    module.weight = nn.Parameter(OffloadedTensor.from_byte_range(index["linear"], "linear"), requires_grad=False)
    set_module_tensor_to_device(module, "weight", "cpu")
    assert module.weight.source_range is not None
    set_module_tensor_to_device(module, "weight", "cpu", value=values["linear"] * 2)
    assert isinstance(module.weight, OffloadedTensor)
    assert torch.equal(module.weight.to_base_tensor(), values["linear"] * 2)
    set_module_tensor_to_device(module, "weight", "cpu", value=values["half"], dtype=torch.bfloat16)
    assert module.weight.dtype == torch.bfloat16
    set_module_tensor_to_device(module, "weight", "meta")
    assert module.weight.device.type == "meta"
    again = OffloadedTensor.from_byte_range(index["linear"], "linear")
    set_module_tensor_to_device(module, "weight", "cpu", value=again, dtype=torch.float32)
    assert torch.equal(module.weight.to_base_tensor(), values["linear"])
    assert not module.weight.requires_grad


def test_state_dicts_can_be_assigned(stored):
    _, values, index = stored
    module, other = nn.Linear(64, 24), nn.Linear(64, 24)
    module.weight = nn.Parameter(OffloadedTensor.from_byte_range(index["linear"], "linear"), requires_grad=False)
    other.load_state_dict(module.state_dict(), assign=True)
    assert isinstance(other.weight, OffloadedTensor)
    # Without assign, torch copies in place: into a plain weight, and into an offloaded one.
    plain = nn.Linear(64, 24)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(plain.weight, values["linear"])
    module.load_state_dict({"weight": values["linear"] * 5, "bias": values["bias"]})
    assert torch.equal(module.weight.to_base_tensor(), values["linear"] * 5)


class Stack(nn.Module):
    """Embedding, layers, and a head tied to the embedding; every weight on disk."""

    def __init__(self, layers=6, width=32, words=40):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, prefetch=None):
        x = self.embed(tokens)
        for place, layer in enumerate(self.layers):
            handles = [prefetch(ahead.weight) for ahead in self.layers[place + 1 : place + 3]] if prefetch else []
            x = torch.tanh(layer(x)) + x
            del handles
        return self.head(x)


def offload(model, folder, packed=False):
    path = folder / "model.safetensors"
    named = {name: p.detach() for name, p in model.named_parameters() if p.dim() == 2}
    save_file(named, path)
    index = CheckpointIndex.open(path)
    by_name = {
        name: nn.Parameter(
            OffloadedTensor.from_original_tensor(QTensorTractScaleOnly.quantize(value), name)
            if packed and name != "embed.weight"
            else OffloadedTensor.from_byte_range(index[name], name),
            requires_grad=False,
        )
        for name, value in named.items()
    }
    for name, parameter in by_name.items():
        module, attribute = name.rsplit(".", 1)
        setattr(model.get_submodule(module), attribute, parameter)
    model.head.weight = model.embed.weight
    return by_name


def greedy(model, tokens, steps, prefetch=None):
    with torch.no_grad():
        for _ in range(steps):
            logits = model(tokens, prefetch)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return logits, tokens


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "q4_0"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_threads_with_different_prompts_get_what_each_gets_alone(tmp_path, strategy, packed):
    torch.manual_seed(0)
    model = Stack()
    weights = offload(model, tmp_path, packed)
    prompts = [torch.tensor([[1, 2, 3]]), torch.tensor([[30, 7]]), torch.tensor([[5]])]
    alone = [greedy(model, prompt, 6) for prompt in prompts]
    budget = sum(w.nbytes_loaded for w in weights.values()) // 3
    pool = TensorResidencyPool(budget, strategy=strategy)
    for weight in weights.values():
        weight.bind_pool(pool)
    found, failures = {}, []

    def work(number):
        try:
            found[number] = greedy(model, prompts[number], 6, pool.prefetch)
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    for number, (logits, tokens) in enumerate(alone):
        assert torch.equal(found[number][0], logits)
        assert torch.equal(found[number][1], tokens)
    pool.flush()
    assert pool.lease_count == 0
    assert pool.resident_bytes <= budget
    pool.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_prefetching_slow_reads_gives_the_same_bits_each_time(tmp_path, strategy, monkeypatch):
    torch.manual_seed(0)
    model = Stack(layers=3)
    weights = offload(model, tmp_path)
    tokens = torch.tensor([[1, 2, 3]])
    expected = greedy(model, tokens, 2)[0]
    original = CheckpointFile.read_into

    def slow(self, view, offset, what=""):
        half = len(view) // 2
        original(self, view[:half], offset, what)
        time.sleep(0.0003)
        original(self, view[half:], offset + half, what)

    monkeypatch.setattr(CheckpointFile, "read_into", slow)
    for run in range(12):
        with TensorResidencyPool(2 * 32 * 40 * 4, max_workers=1 + run % 2, strategy=strategy) as pool:
            for weight in weights.values():
                weight.bind_pool(pool)
            assert torch.equal(greedy(model, tokens, 2, pool.prefetch)[0], expected)


def test_a_read_error_during_a_prefetch_names_the_tensor_and_is_forgotten(stored, monkeypatch):
    weight = OffloadedTensor.from_byte_range(stored[2]["linear"], "linear")
    original = CheckpointFile.read_into
    failures = [True]

    def failing(self, view, offset, what=""):
        if failures:
            failures.pop()
            raise StorageError(5, f"cannot read {self.path}{what}: Input/output error")
        original(self, view, offset, what)

    monkeypatch.setattr(CheckpointFile, "read_into", failing)
    with TensorResidencyPool() as pool:
        with pytest.raises(StorageError, match=r"model.safetensors, tensor 'linear'.*Input/output"):
            pool.prefetch(weight).wait()
        assert torch.equal(pool.resolve(weight), stored[1]["linear"])


def test_an_exception_in_a_layer_leaves_no_lease(stored):
    weight = OffloadedTensor.from_byte_range(stored[2]["linear"], "linear")
    with TensorResidencyPool() as pool:
        weight.bind_pool(pool)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            nn.functional.linear(torch.randn(2, 3), weight)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), pool.acquire(weight):
            nn.functional.linear(torch.randn(2, 3), weight)
        assert pool.lease_count == 0
        assert nn.functional.linear(torch.randn(2, 64), weight).shape == (2, 24)
