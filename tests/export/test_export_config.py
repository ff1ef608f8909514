import pytest
import torch

from t2n_hf.errors import ConfigError
from t2n_hf.export.config import ExportConfig, archive_dtype


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("f32", "f32"), ("float32", "f32"), (torch.float16, "f16"), ("torch.float16", "f16")],
    ids=str,
)
def test_a_dtype_is_taken_in_any_spelling(dtype, name):
    assert archive_dtype(dtype) == name
    assert ExportConfig(dtype=dtype).dtype == name


@pytest.mark.parametrize("dtype", ["bf16", torch.bfloat16], ids=str)
def test_bf16_is_refused_with_what_to_ask_for_instead(dtype):
    with pytest.raises(ConfigError, match="no bf16: export with dtype='f32'"):
        ExportConfig(dtype=dtype)


@pytest.mark.parametrize("dtype", ["i64", torch.float64, "float8"], ids=str)
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ConfigError, match="dtype"):
        ExportConfig(dtype=dtype)


@pytest.mark.parametrize(
    ("of_model", "expected"),
    [(torch.float32, "f32"), (torch.float16, "f16"), (torch.bfloat16, "f32")],
    ids=str,
)
def test_the_dtype_of_the_model_is_kept_and_bf16_becomes_f32(of_model, expected):
    assert ExportConfig().with_dtype(of_model).dtype == expected


def test_an_asked_dtype_wins_over_that_of_the_model():
    assert ExportConfig(dtype="f16").with_dtype(torch.float32).dtype == "f16"


@pytest.mark.parametrize(
    "options",
    [
        {"format": "zip"},
        {"capture": "jit"},
        {"compression_level": 10},
        {"compression_level": 3, "format": "tar"},
        {"max_context": 0},
        {"tolerance": 0.0},
        {"tolerance": float("nan")},
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused_by_name(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ExportConfig(**options)


@pytest.mark.parametrize(
    ("archive_format", "name"), [("tgz", "model.nnef.tgz"), ("tar", "model.nnef.tar"), ("dir", "model")], ids=str
)
def test_the_archive_is_named_after_its_format(archive_format, name):
    assert ExportConfig(format=archive_format).archive_name("model") == name
