"""Models with weights on disk: where they are read from, what is kept, and that nothing is lost."""

import copy
import gc
import os
import pickle  # noqa: TID251 - to show that it refuses
import threading

import models
import pytest
import torch

from t2n_hf import T2NConfig
from t2n_hf.errors import BudgetError, StorageError, UnsupportedOpError
from t2n_hf.hf.hooks import attach_pools, leases_of, offloaded_parameters
from t2n_hf.hf.materialize import materialize
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.quant.q4_0 import QTensorTractScaleOnly

DISK = {"": "disk"}
REFERENCE_NOTE = pytest.mark.filterwarnings("ignore:.*falling back to its reference")


def load(model, folder, quantization=None, **options):
    options.setdefault("dtype", "auto")
    return type(model).from_pretrained(folder, quantization_config=quantization or T2NConfig(), **options)


def logits(model, length=12):
    with torch.no_grad():
        return model(models.prompt(length)).logits


def greedy(model, seed=1, tokens=8):
    ids = models.prompt(seed=seed)
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)


@pytest.mark.parametrize("name", ["m1", "m2", "m4", "m7", "m8", "m10"])
@pytest.mark.parametrize("weights", ["q4_0", "none"])
@REFERENCE_NOTE
def test_everything_on_disk_computes_the_same(name, weights, tmp_path):
    source = getattr(models, name)()
    folder = models.saved(source, tmp_path)
    resident = load(source, folder, T2NConfig(weights), experts_implementation="eager")
    on_disk = load(source, folder, T2NConfig(weights), device_map=DISK)
    assert torch.equal(logits(on_disk), logits(resident))
    assert all(p.dim() < 2 or isinstance(p, OffloadedTensor) for p in on_disk.parameters())
    assert leases_of(on_disk).pool.resident_bytes == 0
    first, *others = on_disk.hf_device_map.items()
    assert others == [("", "disk")]
    assert first[1] == "cpu"
    assert not any(isinstance(p, OffloadedTensor) for p in on_disk.get_submodule(first[0]).parameters())
    assert on_disk.device == torch.device("cpu")


def test_one_layer_on_disk_is_quantized_like_the_others(tmp_path):
    source = models.m1()
    folder = models.saved(source, tmp_path)
    device_map = {"model.layers.1": "disk", "": "cpu"}
    part = load(source, folder, device_map=device_map)
    assert device_map == {"model.layers.1": "disk", "": "cpu"}
    assert torch.equal(logits(part), logits(load(source, folder)))
    planned = {name for name, choice in part.hf_quantizer.plan.items() if choice.format is not None}
    assert planned
    for name in planned:
        parameter = part.get_parameter(name)
        kind = parameter.inner_class if isinstance(parameter, OffloadedTensor) else type(parameter)
        assert kind is QTensorTractScaleOnly
        assert isinstance(parameter, OffloadedTensor) is name.startswith("model.layers.1.")
    assert part.hf_device_map == device_map


@pytest.mark.parametrize("weights", ["q4_0", "none"])
def test_a_tied_table_is_in_one_place(weights, tmp_path):
    source = models.m1()
    folder = models.saved(source, tmp_path)
    device_map = {"model.embed_tokens": "disk", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    model = load(source, folder, T2NConfig(weights), device_map={**device_map, "lm_head": "cpu"})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.hf_device_map["model.embed_tokens"] == "cpu"
    assert not offloaded_parameters(model)
    assert torch.equal(logits(model), logits(load(source, folder, T2NConfig(weights))))


@pytest.mark.parametrize("name", ["m1", "m4"])
def test_plain_weights_are_read_from_the_users_file_and_nothing_is_written(name, tmp_path):
    source = getattr(models, name)()
    folder = models.saved(source, tmp_path, max_shard_size="40KB")
    spill = tmp_path / "spill"
    spill.mkdir()
    before = {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.iterdir()}
    model = load(source, folder, T2NConfig("none", spill_dir=spill), device_map=DISK)
    for parameter in offloaded_parameters(model).values():
        files = {r.file.path.parent for r in parameter.source.content.ranges}
        assert files == {folder}
    logits(model)
    assert {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.iterdir()} == before
    assert not any(spill.iterdir())
    open_files = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    assert not [name for name in open_files if str(spill) in name]


def test_a_dtype_that_differs_from_the_files_is_cast_when_read(tmp_path):
    source = models.m1()
    folder = models.saved(source, tmp_path)
    options = {"dtype": torch.bfloat16}
    on_disk = load(source, folder, T2NConfig("none"), device_map=DISK, **options)
    resident = load(source, folder, T2NConfig("none"), **options)
    assert {p.dtype for p in on_disk.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(on_disk), logits(resident))


@pytest.mark.parametrize("name", ["m1", "m7"])
@pytest.mark.parametrize("weights", ["q4_0", "none"])
@REFERENCE_NOTE
def test_generation_in_a_quarter_of_the_memory_gives_the_same_tokens(name, weights, tmp_path):
    source = getattr(models, name)()
    folder = models.saved(source, tmp_path)
    resident = load(source, folder, T2NConfig(weights), experts_implementation="eager")
    budget = max(sum(p.nbytes for p in source.parameters()) // 4, 66_000)
    model = load(source, folder, T2NConfig(weights, max_resident_bytes=budget), device_map=DISK)
    pool = leases_of(model).pool
    assert pool.max_cached_bytes == budget
    assert torch.equal(greedy(model), greedy(resident))
    assert pool.lease_count == 0
    assert 0 < pool.resident_bytes <= budget
    assert model.get_memory_footprint() >= pool.resident_bytes


def test_the_budget_comes_from_max_memory(tmp_path):
    source = models.m2(num_hidden_layers=8)
    folder = models.saved(source, tmp_path)
    limit = 400_000
    model = load(source, folder, T2NConfig("none"), device_map="auto", max_memory={"cpu": limit})
    assert "disk" in model.hf_device_map.values()
    assert "cpu" in model.hf_device_map.values()
    pool = leases_of(model).pool
    resident = sum(p.nbytes for p in model.parameters() if not isinstance(p, OffloadedTensor))
    assert 0 < pool.max_cached_bytes <= limit - resident
    assert torch.equal(logits(model), logits(source))
    assert pool.resident_bytes + resident <= limit


def test_a_budget_below_the_largest_weight_is_refused_by_name(tmp_path):
    source = models.m1()
    folder = models.saved(source, tmp_path)
    with pytest.raises(BudgetError, match=r"60000 bytes.*lm_head needs at once \(65536\)"):
        load(source, folder, T2NConfig("none", max_resident_bytes=60_000), device_map=DISK)


def test_an_exception_in_forward_leaves_no_lease(tmp_path):
    source = models.m1()
    folder = models.saved(source, tmp_path)
    model = load(source, folder, T2NConfig("none", max_resident_bytes=100_000), device_map=DISK)
    expected = greedy(model)

    def fail(module, args):
        raise RuntimeError("in the middle of a layer")

    pool = leases_of(model).pool
    for module in (model.model.layers[1].mlp.act_fn, model.model.layers[1].mlp.down_proj):
        handle = module.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            greedy(model)
        handle.remove()
        assert pool.lease_count == 0
        assert torch.equal(greedy(model), expected)


def test_an_interrupt_leaves_nothing_for_the_next_run(tmp_path):
    source = models.m1()
    model = load(source, models.saved(source, tmp_path), T2NConfig("none"), device_map=DISK)
    expected = logits(model)

    def interrupt(module, args, output):
        raise KeyboardInterrupt

    down = model.model.layers[0].mlp.down_proj
    handle = down.register_forward_hook(interrupt, prepend=True)
    with pytest.raises(KeyboardInterrupt):
        logits(model)
    handle.remove()
    assert torch.equal(logits(model), expected)
    assert leases_of(model).pool.lease_count == 0


def interrupted(model):
    def interrupt(module, args):
        raise KeyboardInterrupt

    handle = model.model.layers[0].mlp.down_proj.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(model)
    handle.remove()


def test_an_interrupt_does_not_keep_a_model_from_being_materialized(tmp_path):
    source = models.m1()
    model = load(source, models.saved(source, tmp_path), T2NConfig("none"), device_map=DISK)
    interrupted(model)
    assert leases_of(model).pool.lease_count > 0
    assert torch.equal(logits(materialize(model)), logits(source))


def test_what_a_thread_that_ended_has_left_is_released(tmp_path):
    source = models.m1()
    model = load(source, models.saved(source, tmp_path), T2NConfig("none"), device_map=DISK)
    thread = threading.Thread(target=interrupted, args=(model,))
    thread.start()
    thread.join()
    logits(model)
    assert leases_of(model).pool.lease_count == 0


def test_a_model_on_disk_is_not_pickled(tmp_path):
    source = models.m1()
    model = load(source, models.saved(source, tmp_path), T2NConfig("none"), device_map=DISK)
    with pytest.raises(UnsupportedOpError, match="save_pretrained"):
        pickle.dumps(model)


def test_two_threads_each_get_their_own_tokens(tmp_path):
    source = models.m1()
    folder = models.saved(source, tmp_path)
    model = load(source, folder, T2NConfig("none", max_resident_bytes=70_000), device_map=DISK)
    expected = {seed: greedy(model, seed) for seed in (1, 2)}
    found = {}

    def run(seed):
        found[seed] = [greedy(model, seed) for _ in range(3)]

    threads = [threading.Thread(target=run, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got, expected[seed]) for seed in expected for got in found[seed])
    pool = leases_of(model).pool
    assert pool.lease_count == 0
    assert pool.resident_bytes <= 70_000


def test_a_streamer_in_a_thread_sees_the_tokens(tmp_path):
    source = models.m1()
    model = load(source, models.saved(source, tmp_path), T2NConfig("none"), device_map=DISK)
    seen = []

    class Streamer:
        def put(self, value):
            seen.extend(value.reshape(-1).tolist())

        def end(self):
            pass

    ids = models.prompt()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "streamer": Streamer()}
    thread = threading.Thread(target=model.generate, args=(ids,), kwargs=options)
    thread.start()
    thread.join()
    assert seen == greedy(model)[0].tolist()


def test_a_copied_model_has_a_pool_of_its_own(tmp_path):
    source = models.m1()
    model = load(source, models.saved(source, tmp_path), T2NConfig(max_resident_bytes=100_000), device_map=DISK)
    copied = copy.deepcopy(model)
    assert torch.equal(logits(copied), logits(model))
    assert leases_of(copied) is not leases_of(model)
    pools = {p.pool for p in offloaded_parameters(copied).values()}
    assert pools == {leases_of(copied).pool}
    assert leases_of(copied).pool.lease_count == 0
    model_pool = leases_of(model).pool
    leases_of(copied).detach(copied)
    assert not model_pool.closed
    assert torch.equal(logits(copied), logits(model))


def test_a_file_that_changed_is_noticed(tmp_path):
    source = models.m1()
    folder = models.saved(source, tmp_path)
    model = load(source, folder, T2NConfig("none"), device_map=DISK)
    expected = logits(model)
    file = folder / "model.safetensors"
    stat = file.stat()
    content = file.read_bytes()
    os.truncate(file, 1000)
    with pytest.raises(StorageError, match=r"model\.safetensors.*tensor 'model"):
        logits(model)
    assert leases_of(model).pool.lease_count == 0
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert torch.equal(logits(model), expected)


def test_writes_go_to_a_private_place(tmp_path):
    source = models.m2()
    folder = models.saved(source, tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    model = load(source, folder, T2NConfig("none"), device_map=DISK)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert torch.equal(logits(model), torch.zeros(1, 12, 256))
    assert (folder / "model.safetensors").read_bytes() == before


def test_rows_of_an_embedding_are_read_alone(tmp_path):
    source = models.m2()
    model = load(source, models.saved(source, tmp_path), T2NConfig("none", max_resident_bytes=66_000), device_map=DISK)
    pool = leases_of(model).pool
    with torch.no_grad():
        model.model.embed_tokens(models.prompt(4))
    assert pool.resident_bytes == 0


def test_a_pool_can_be_attached_to_what_is_loaded_otherwise(tmp_path):
    linear = torch.nn.Linear(8, 4)
    expected = linear(torch.ones(1, 8)).detach()
    linear.weight = torch.nn.Parameter(OffloadedTensor.from_original_tensor(linear.weight.detach(), "w"), False)
    leases = attach_pools(linear, {torch.device("cpu"): 128})
    with torch.no_grad():
        assert torch.equal(linear(torch.ones(1, 8)), expected)
    assert leases.pool.resident_bytes == 128
    leases.detach(linear)
    assert leases_of(linear) is None


def test_models_end_without_a_trace(tmp_path):
    source = models.m1()
    folder = models.saved(source, tmp_path)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    model = load(source, folder, device_map=DISK)
    logits(model)
    del model
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
