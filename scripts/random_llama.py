"""Write Llama checkpoints of random values for the benchmarks: bf16 shards, streamed tensor by tensor.

Speed and memory do not depend on the values, so that no model of these sizes has to be fetched. The values are seeded
normals of the initializer's width: logits stay finite and the same command writes the same bytes.
"""

import argparse
import json
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

DEFAULT_OUT = Path(__file__).resolve().parent.parent / ".cache"
STD = 0.02
POSITIONS = 2048


@dataclass(frozen=True)
class Shape:
    """The numbers that make a Llama, and how large its shards may be."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    shard_bytes: int

    def config(self) -> LlamaConfig:
        """The model's config: untied, bf16, without an end token (generation runs to its full length)."""
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
            dtype="bfloat16",
            architectures=["LlamaForCausalLM"],
        )


SHAPES = {
    "tiny": Shape(hidden=128, intermediate=352, layers=4, heads=4, kv_heads=2, vocab=512, shard_bytes=1 << 20),
    "300m": Shape(hidden=1024, intermediate=2816, layers=10, heads=16, kv_heads=4, vocab=16000, shard_bytes=100 << 20),
    "1.1b": Shape(hidden=2048, intermediate=5632, layers=22, heads=32, kv_heads=4, vocab=32000, shard_bytes=500 << 20),
    "7b": Shape(hidden=4096, intermediate=11008, layers=32, heads=32, kv_heads=32, vocab=32000, shard_bytes=2 << 30),
}


def shards_of(shapes: dict[str, torch.Size], limit: int) -> Iterator[dict[str, torch.Size]]:
    """Consecutive tensors whose bytes stay within `limit`."""
    shard: dict[str, torch.Size] = {}
    held = 0
    for name, shape in shapes.items():
        nbytes = 2 * shape.numel()
        if shard and held + nbytes > limit:
            yield shard
            shard, held = {}, 0
        shard[name] = shape
        held += nbytes
    yield shard


def values_of(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Ones for a norm, else random normals; both bf16."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape).normal_(std=STD, generator=generator).bfloat16()


def write_shard(path: Path, shapes: dict[str, torch.Size], generator: torch.Generator) -> None:
    """Write one safetensors file, holding one tensor at a time."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * shape.numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            out.write(values_of(name, shape, generator).view(torch.int16).numpy().data)


def build(size: str, folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint of `size` into `folder`, unless it is there whole."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[size]
    config = shape.config()
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    shards = list(shards_of(shapes, shape.shard_bytes))
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_shard(folder / name, shard, generator)
        index.update(dict.fromkeys(shard, name))
    total = sum(2 * one.numel() for one in shapes.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text)
    model.generation_config.save_pretrained(folder)
    config.save_pretrained(folder)  # last: it marks the folder as whole
    return folder


def main() -> int:
    """Write one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("out", type=Path, nargs="?", help="default: .cache/random-llama-SIZE")
    arguments = parser.parse_args()
    print(build(arguments.size, arguments.out or DEFAULT_OUT / f"random-llama-{arguments.size}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
