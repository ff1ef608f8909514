"""What only a machine with an accelerator can show of device maps. Run by device_check.sh.

Makes a random Llama (no download), loads it by several maps, and compares each with the same model on the CPU:
Q4_0 weights have the same bytes, float32 logits agree to rounding, greedy tokens in float32 are the same. Then it looks
at torch's own count of device memory while tokens are generated within a limit, and times a token with and without
loading ahead. Exits with 1 when a check fails.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from t2n_hf import T2NConfig, load_checkpoint_and_dispatch
from t2n_hf.hf.hooks import leases_of, offloaded_parameters

FAILED = []


def check(what, held, figure=""):
    print(f"{'ok  ' if held else 'FAIL'} {what}{f': {figure}' if figure else ''}", flush=True)
    if not held:
        FAILED.append(what)


def make(folder, layers, hidden):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=hidden * 4,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="200MB")
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def load(folder, weights, dtype, **options):
    machine = {name: options.pop(name) for name in ("readahead_bytes", "max_resident_bytes") if name in options}
    config = T2NConfig(weights, **machine)
    return LlamaForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype, **options)


def prompt(length=16):
    return torch.randint(3, 8000, (1, length), generator=torch.Generator().manual_seed(1))


def logits(model):
    with torch.no_grad():
        return model(prompt().to(model.device)).logits.float().cpu()


def tokens(model, count=12):
    ids = prompt().to(model.device)
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0].tolist()


def parts(tensor):
    value = tensor.reload() if hasattr(tensor, "reload") else tensor
    return {name: part.cpu() for name, part in value.to_offload_state()["tensors"].items()}


def compare(folder, size, accelerator):
    limit = size * 2 // 5
    rest = {"cpu": "100GB"} if accelerator != "cpu" else {}
    main = 0 if accelerator != "cpu" else "cpu"
    maps = {
        "all on the accelerator": {"device_map": {"": accelerator}},
        "a layer on disk, one in memory": {
            "device_map": {"": accelerator, "model.layers.0": "disk", "model.layers.1": "cpu", "lm_head": "disk"}
        },
        "planned, rest in memory": {"device_map": "auto", "max_memory": {**rest, main: limit}},
        "planned, rest on disk": {"device_map": "auto", "max_memory": {"cpu": 0, main: limit}},
    }
    for weights in ("none", "q4_0"):
        expected = load(folder, weights, torch.float32)
        reference, greedy = logits(expected), tokens(expected)
        packed = parts(expected.model.layers[0].mlp.up_proj.weight) if weights == "q4_0" else {}
        for name, options in maps.items():
            model = load(folder, weights, torch.float32, **options)
            difference = (logits(model) - reference).abs().max().item() / reference.abs().max().item()
            check(f"{weights}, {name}: logits in float32 agree", difference < 1e-3, f"{difference:.1e}")
            check(f"{weights}, {name}: greedy tokens are the same", tokens(model) == greedy)
            check(
                f"{weights}, {name}: the device is the accelerator", model.device.type == torch.device(accelerator).type
            )
            if packed:
                ours = parts(model.model.layers[0].mlp.up_proj.weight)
                check(f"{weights}, {name}: packed bytes", all(torch.equal(ours[part], packed[part]) for part in packed))
            leases = leases_of(model)
            check(f"{weights}, {name}: no lease is left", leases is None or leases.pool.lease_count == 0)
            print(f"     map: {len(offloaded_parameters(model))} weights offloaded", flush=True)
            del model
            torch.cuda.empty_cache()


def budgets(folder, size, accelerator):
    for share in (0.3, 0.6):
        limit = int(size * share)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model = load(folder, "none", torch.bfloat16, device_map="auto", max_memory={0: limit, "cpu": 0})
        loading = torch.cuda.max_memory_allocated() - before
        tokens(model, 4)
        torch.cuda.reset_peak_memory_stats()
        tokens(model, 32)
        running = torch.cuda.max_memory_allocated() - before
        slack = 64 << 20  # activations, keys and values, workspaces
        check(f"limit {limit / 1e6:.0f} MB holds while loading", loading <= limit + slack, f"{loading / 1e6:.0f} MB")
        check(f"limit {limit / 1e6:.0f} MB holds while generating", running <= limit + slack, f"{running / 1e6:.0f} MB")
        del model


def speeds(folder, size, accelerator):
    limit = int(size * 0.4)
    for where, memory in (("disk", 0), ("pinned memory", "100GB")):
        times = {}
        for name, ahead in (("without loading ahead", 0), ("with", None)):
            options = {"device_map": "auto", "max_memory": {0: limit, "cpu": memory}, "readahead_bytes": ahead}
            model = load(folder, "none", torch.bfloat16, **options)
            tokens(model, 4)
            torch.cuda.synchronize()
            start = time.perf_counter()
            tokens(model, 24)
            torch.cuda.synchronize()
            times[name] = (time.perf_counter() - start) / 24 * 1000
            del model
        figures = ", ".join(f"{name} {ms:.1f} ms per token" for name, ms in times.items())
        print(f"     offloaded to {where}: {figures}", flush=True)


def modules(accelerator):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    x = torch.randn(4, 512)
    expected = net(x).detach()
    with tempfile.TemporaryDirectory() as folder:
        from safetensors.torch import save_model

        save_model(net, f"{folder}/net.safetensors")
        device_map = {"": accelerator, "1": "disk", "2": "cpu"}
        net = load_checkpoint_and_dispatch(net, f"{folder}/net.safetensors", device_map)
        with torch.no_grad():
            found = net(x)
    check("a plain module: the output is where the input was", found.device == x.device)
    check("a plain module: values", torch.allclose(found, expected, atol=1e-3, rtol=1e-3))
    check("a plain module: its input can be there as well", net(x.to(accelerator)).device == torch.device(accelerator))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--on-cpu", action="store_true", help="try the script itself, with the CPU as the accelerator")
    options = parser.parse_args()
    if options.on_cpu:
        with tempfile.TemporaryDirectory() as folder:
            modules("cpu")
            compare(folder, make(folder, 12, 256), "cpu")
        return 1 if FAILED else 0
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to check (the CPU's part is in tests/)")
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        size = make(folder, options.layers, options.hidden)
        print(f"a random model of {size / 1e6:.0f} MB in bf16")
        modules("cuda:0")
        compare(folder, size, "cuda:0")
        budgets(folder, size, "cuda:0")
        speeds(folder, size, "cuda:0")
    print("failed: " + "; ".join(FAILED) if FAILED else "all checks hold")
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
