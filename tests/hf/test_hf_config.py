import copy
import json

import pytest

from t2n_hf.errors import ConfigError, UnknownTagError
from t2n_hf.hf.config import T2NConfig

EVERY = {
    "weights": "t2n_hf.q4_0.v1",
    "embeddings": "q4_0",
    "lm_head": "none",
    "modules_to_not_convert": ["mlp", "layers.0"],
    "compute": "fast",
    "max_resident_bytes": 1 << 20,
    "spill_dir": "/var/tmp",
    "readahead_bytes": 1 << 18,
    "max_length": 512,
    "batch_size": 4,
}


def test_every_option_survives_json_and_back():
    config = T2NConfig(**EVERY)
    again = T2NConfig.from_dict(json.loads(config.to_json_string()))
    assert {name: getattr(again, name) for name in EVERY} == EVERY
    assert again.to_json_string() == config.to_json_string()


def test_a_config_can_be_copied_and_printed():
    config = copy.deepcopy(T2NConfig(**EVERY))
    assert dict(config)["max_resident_bytes"] == 1 << 20
    assert '"weights": "t2n_hf.q4_0.v1"' in repr(config)


def test_what_describes_the_machine_stays_out_of_what_is_saved():
    saved = T2NConfig(**EVERY).to_dict()
    assert set(saved) == {"quant_method", "weights", "embeddings", "lm_head", "modules_to_not_convert", "compute"}
    assert saved["quant_method"] == "t2n"


def test_an_unknown_option_is_refused_and_the_known_ones_are_named():
    with pytest.raises(ConfigError, match=r"no option 'wights'.*weights, embeddings, lm_head.*spill_dir"):
        T2NConfig(wights="q4_0")
    with pytest.raises(ConfigError, match=r"no option 'bits'.*weights"):
        T2NConfig.from_dict({"quant_method": "t2n", "bits": 4})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": None}, "weights=None"),
        ({"embeddings": 4}, "embeddings=4"),
        ({"compute": "quick"}, "compute='quick'; expected one of exact, fast"),
        ({"max_resident_bytes": -1}, "max_resident_bytes=-1"),
        ({"max_resident_bytes": 0.5}, "max_resident_bytes=0.5"),
        ({"readahead_bytes": -1}, "readahead_bytes=-1"),
        ({"max_length": 0}, "max_length=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"batch_size": None}, "batch_size=None"),
        ({"modules_to_not_convert": "mlp"}, "modules_to_not_convert='mlp'"),
        ({"modules_to_not_convert": [""]}, "modules_to_not_convert"),
        ({"modules_to_not_convert": 5}, "modules_to_not_convert=5"),
        ({"modules_to_not_convert": {"mlp": 1}}, "modules_to_not_convert={'mlp': 1}"),
        ({"spill_dir": 5}, "spill_dir=5"),
        ({"spill_dir": b"/tmp"}, "spill_dir=b'/tmp'"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_value_out_of_range_is_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        T2NConfig(**options)


def test_a_class_that_is_not_installed_is_named_with_those_that_are():
    with pytest.raises(UnknownTagError, match=r"'q2_k'.*t2n_hf\.q4_0\.v1"):
        T2NConfig("q2_k")


def test_the_config_of_another_method_is_refused():
    with pytest.raises(ConfigError, match="'gptq'"):
        T2NConfig.from_dict({"quant_method": "gptq"})


def test_unused_arguments_are_handed_back_when_asked_for():
    config, unused = T2NConfig.from_dict(
        {"weights": "none"}, return_unused_kwargs=True, compute="fast", revision="main"
    )
    assert (config.weights, config.compute, unused) == ("none", "fast", {"revision": "main"})


def test_the_names_of_a_set_are_put_in_an_order_that_every_process_gives():
    names = {f"layers.{i}" for i in range(20)}
    assert T2NConfig(modules_to_not_convert=names).modules_to_not_convert == sorted(names)
    assert T2NConfig(modules_to_not_convert=("b", "a")).modules_to_not_convert == ["b", "a"]
