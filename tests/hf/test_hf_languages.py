"""X-MOD's adapters, of which each language has its own, are captured and give what transformers' own code gives."""

import copy

import models
import pytest
import torch
import transformers as hf

from t2n_hf import export_nnef
from t2n_hf.errors import CaptureError
from t2n_hf.hf.capturable.languages import capturable_languages

_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def xmod(kind=hf.XmodForMaskedLM, **changes):
    options = {"vocab_size": 64, "max_position_embeddings": 40, "languages": ["en_XX", "de_DE", "fr_XX"], **_SIZES}
    model = models.build(kind, hf.XmodConfig(**(options | {"default_language": "de_DE"} | changes)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def ids(rows, length):
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(length))


NORMS = [
    {},
    {"ln_before_adapter": False},
    {"adapter_layer_norm": True},
    {"adapter_reuse_layer_norm": False},
    {"adapter_reuse_layer_norm": False, "ln_before_adapter": False},
]
LANGUAGES = {"default": None, "of each row": torch.tensor([2, 0, 1]), "of one": torch.tensor([1, 1, 1])}


@pytest.mark.parametrize("changes", NORMS, ids=str)
@pytest.mark.parametrize("languages", LANGUAGES)
@torch.no_grad()
def test_adapters_give_what_transformers_code_gives(changes, languages):
    model = xmod(**changes)
    given = {"input_ids": ids(3, 5), "lang_ids": LANGUAGES[languages]}
    wanted = model(**given).logits
    with capturable_languages(model):
        got = model(**given).logits
    torch.testing.assert_close(got, wanted)


def test_models_are_as_before_after_an_error():
    model = xmod()
    before = [copy.copy(vars(module)) for module in model.modules()]

    def fail():
        with capturable_languages(model):
            assert any("lang_adapter" in vars(module) for module in model.modules())
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fail()
    assert [vars(module) for module in model.modules()] == before


@pytest.mark.tract
@pytest.mark.parametrize("kind", [hf.XmodForMaskedLM, hf.XmodModel], ids=lambda kind: kind.__name__)
def test_the_default_language_is_exported_at_free_lengths(kind, tmp_path):
    report = export_nnef(xmod(kind), tmp_path / "out")
    assert not any("en_XX" in name for name in report.formats)


@pytest.mark.tract
def test_a_decoder_is_exported_with_its_cache(tmp_path):
    export_nnef(xmod(hf.XmodForCausalLM, is_decoder=True), tmp_path / "out")


def test_without_a_default_language_it_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(CaptureError, match=r"Please call `XmodPreTrainedModel.set_default_language\(\)`"):
        export_nnef(xmod(default_language=None), tmp_path / "out")


@pytest.mark.tract
def test_languages_of_rows_may_be_an_input(tmp_path):
    given = {
        "input_ids": ids(3, 5),
        "attention_mask": torch.ones(3, 5, dtype=torch.int64),
        "lang_ids": torch.tensor([2, 0, 1]),
    }
    rows, length = torch.export.Dim("B", min=1), torch.export.Dim("S", min=1, max=32)
    free = {"input_ids": {0: rows, 1: length}, "attention_mask": {0: rows, 1: length}, "lang_ids": {0: rows}}
    report = export_nnef(xmod(), tmp_path / "out", example_kwargs=given, dynamic_shapes=free)
    assert report.check == "passed"
