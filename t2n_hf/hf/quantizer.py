"""The quantizer that transformers calls while it loads and saves a model with a T2NConfig."""

import copy
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer

from t2n_hf.errors import T2NError
from t2n_hf.hf.calibration.importance import importance_for
from t2n_hf.hf.config import NOT_QUANTIZED, QUANT_METHOD, T2NConfig
from t2n_hf.hf.conversions import PlaceWeights, RebuildWeights, is_ours, with_parts
from t2n_hf.hf.dispatch.moving import align_inputs, hold_in_place
from t2n_hf.hf.experts import fused_rules, itemwise
from t2n_hf.hf.failures import raise_first
from t2n_hf.hf.hooks import attach_pools, offloaded_parameters
from t2n_hf.hf.late import LateWeights
from t2n_hf.hf.materialize import materialize
from t2n_hf.hf.placement.cache_size import cache_nbytes_of
from t2n_hf.hf.placement.device_map import Placement, checked_map
from t2n_hf.hf.placement.infer import infer_map
from t2n_hf.hf.placement.needs import ModelNeeds, needs_of
from t2n_hf.hf.placement.preflight import PlacementReport, preflight
from t2n_hf.hf.placing import Placing
from t2n_hf.hf.plan import Plan, make_plan, tied_groups
from t2n_hf.hf.report import CoverageReport, coverage_of
from t2n_hf.hf.saving import adopt, packed_state_dict
from t2n_hf.hf.sources import CheckpointSources, MappedPages
from t2n_hf.hf.stored import StoredForms
from t2n_hf.store.checkpoint import CheckpointIndex

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["COVERAGE_THRESHOLD", "T2NQuantizer", "register"]

# Below this share of what could be quantized, loading warns: someone who asked for 4 bits would not expect it.
COVERAGE_THRESHOLD: Final = 0.5


class T2NQuantizer(HfQuantizer):
    """Loads, quantizes, offloads and saves. Made by from_pretrained, one for each model; kept as `model.hf_quantizer`.

    `plan` says for each parameter what was chosen and why, `placement` what sits where.
    """

    requires_calibration = False
    quantization_config: T2NConfig

    def __init__(self, quantization_config: T2NConfig, **kwargs: object) -> None:
        super().__init__(copy.deepcopy(quantization_config), **kwargs)
        self.plan: Plan = {}
        self.relative_errors: dict[str, float] = {}
        self.placement: PlacementReport | None = None
        self.source_files: tuple[Path, ...] = ()
        self._needs = ModelNeeds(())
        self._placement = Placement()
        self._dtype = torch.get_default_dtype()
        self._placing: Placing | None = None
        self._forms = StoredForms.from_json(self.quantization_config.tensors)

    # ---- before the model exists ----------------------------------------------------------------------------------

    def validate_environment(self, device_map: object = None, **kwargs: object) -> None:
        """Check the configuration; with device_map="auto" this is called again, with the map that was inferred.

        That second map, which only this load uses, is where "disk" is taken out of, in place.
        """
        if "weights_only" in kwargs:  # the first call: the map is the user's own
            self._compare_with_requested()
        elif isinstance(device_map, dict):
            planned = device_map if self._placing is None else self._inferred(self._placing.model)
            shown = self._placement.take(planned)
            device_map.clear()
            device_map.update(shown)
            self._check()

    def _limit(self, limits: Mapping[Any, int]) -> None:
        self._placement.limits = {device: int(limit) for device, limit in limits.items()}

    def _inferred(self, model: nn.Module) -> dict[str, Any]:
        no_split: Any = getattr(model, "_no_split_modules", None)
        return infer_map(
            model,
            self._needs,
            self._placement.limits,
            no_split=no_split or (),
            readahead_nbytes=self.quantization_config.readahead_bytes,
        )

    def _check(self) -> None:
        """Refuse what cannot fit, before anything is loaded."""
        config = self.quantization_config
        if self._placing is not None:
            self.placement = preflight(
                self._needs,
                self._placement,
                max_resident_bytes=config.max_resident_bytes,
                spill_dir=config.spill_dir,
            )

    def _compare_with_requested(self) -> None:
        if self.pre_quantized and self.quantization_config.importance is not None:
            warnings.warn("the checkpoint is quantized already: importance is ignored", stacklevel=2)
        asked = self.quantization_config.requested
        self.quantization_config.requested = None
        if not self.pre_quantized or asked is None or asked == T2NConfig().get_loading_attributes()["requested"]:
            return
        other = [f"{k}={v!r}" for k, v in asked.items() if v != getattr(self.quantization_config, k)]
        if other:
            warnings.warn(
                f"the checkpoint is quantized already: its own options hold, {', '.join(other)} is ignored",
                stacklevel=2,
            )

    def update_device_map(self, device_map: Any) -> Any:  # noqa: ANN401 - whatever transformers takes
        """Take "disk" out of a copy of the user's map. Raises ConfigError for a device that is not there."""
        if not isinstance(device_map, dict) or _is_without_values(device_map):
            return device_map
        self._limit(self.quantization_config.limits or {})
        return self._placement.take(checked_map(device_map))

    def update_attn_implementation(self, config: Any) -> Any:  # noqa: ANN401
        """Have fused experts computed one by one: the grouped kernels would need all of them dense at once."""
        text = config.get_text_config()
        for one in {id(config): config, id(text): text}.values():
            if any(getattr(one, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
                one._experts_implementation = "eager"
        return config

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Note the dtype that weights act as. It is kept as asked."""
        self._dtype = dtype
        return dtype

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        """Note the limits. The map that transformers makes of them is replaced by ours, see `validate_environment`."""
        self._limit(max_memory)
        return {"cpu": sys.maxsize}

    # ---- the empty model ------------------------------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self,
        model: "PreTrainedModel",
        checkpoint_files: list[str] | None = None,
        device_map: object = None,
        **kwargs: object,
    ) -> None:
        self._placement.tie(tied_groups(model))
        self.plan = make_plan(model, self.quantization_config)
        files = [f for f in checkpoint_files or [] if f.endswith(".safetensors")]
        self.source_files = tuple(Path(f).absolute() for f in files)
        index = CheckpointIndex.open(files) if files else None
        self._placing = Placing(
            model=model,
            config=self.quantization_config,
            plan=self.plan,
            placement=self._placement,
            dtype=self._dtype,
            forms=self._forms,
            packed=self.pre_quantized,
            pages=MappedPages(files),
            sources=None if index is None else CheckpointSources(index, model, self),
        )
        late, sources = self.quantization_config.late, self._placing.sources
        if late is not None and sources is not None and not self.pre_quantized:
            folder = self.quantization_config.spill_dir
            self._placing.late = LateWeights(sources, self._placing.pages, keeps=late == "once", spill_folder=folder)
        if not self.pre_quantized:
            self._placing.importance = importance_for(model, self.plan, self.quantization_config.importance)
        if device_map is None or _is_without_values(device_map):
            return
        config = self.quantization_config
        cache = cache_nbytes_of(model, config.max_length, config.batch_size, self._dtype)
        self._needs = needs_of(model, self._placing.describe, tied_groups(model), cache)
        if isinstance(device_map, dict):
            self._placement.complete(model)
            device_map.update(self._placement.take(self._placement.asked))
            self._check()

    def param_needs_quantization(self, model: "PreTrainedModel", param_name: str, **kwargs: object) -> bool:
        """Say whether the parameter passes through PlaceWeights: it is to be quantized, or to stay on disk."""
        return self._placing is not None and self._placing.wants(param_name)

    def param_element_size(self, model: "PreTrainedModel", param_name: str, param: torch.Tensor) -> float:
        """Bytes per element that the parameter will take, exactly: device maps are planned with it."""
        if self._placing is None:
            return param.element_size()
        return self._placing.describe((param_name,), param).nbytes / max(1, param.numel())

    def get_quantize_ops(self) -> PlaceWeights:
        """Give the operation for weights that `param_needs_quantization`."""
        assert self._placing is not None
        return PlaceWeights(self._placing)

    # ---- a checkpoint that is packed already ----------------------------------------------------------------------

    @property
    def serialized_names(self) -> dict[str, list[str]]:  # type: ignore[override]
        """Names of stored parts, by the last name of their parameter."""
        return self._forms.serialized_names() if self.pre_quantized else {}

    def get_load_operations(self) -> dict[str, type[RebuildWeights]]:
        """Name the operation that makes a weight of its parts."""
        return {"deserialize": RebuildWeights}

    def update_weight_conversions(self, weight_conversions: Any, model: "PreTrainedModel") -> Any:  # noqa: ANN401
        """Add the rules that rebuild packed weights to those of the model; experts are quantized one at a time."""
        if not self.pre_quantized:
            fused = [] if self._placing is None else fused_rules(self._placing.stacks())
            return [*map(itemwise, weight_conversions), *fused]
        rebuilding = self.get_weight_conversions()
        if not rebuilding:
            return weight_conversions
        return with_parts(weight_conversions, rebuilding, lambda key: self._forms.name_of_part(key) is not None)

    def rebuild(self, name: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """Make parameter `name` of its parts. What fails is raised when loading ends."""
        assert self._placing is not None
        return self._placing.rebuild(name, parts)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:  # noqa: ANN401
        """Leave packed parts, and plain weights that stay on disk, as they are stored."""
        wanted = super().get_new_dtype(converter, param, dtype)
        names = getattr(converter, "target_patterns", [])
        if wanted is None or self._placing is None or len(names) != 1 or not self._placing.stays_on_disk(names[0]):
            return wanted
        self._placing.dtypes[names[0]] = wanted
        return None

    # ---- the loaded model -----------------------------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model: "PreTrainedModel", **kwargs: object) -> "PreTrainedModel":
        placing, self._placing = self._placing, None
        assert placing is not None
        placing.finish()
        self.relative_errors = placing.errors
        raise_first(placing.failures)
        if self._placement.asked:  # also when all of it is on one device: who asked for a map can look at it
            model.hf_device_map = self._placement.true_map()  # type: ignore[assignment]
        if offloaded_parameters(model):
            assert self.placement is not None  # without a map nothing is offloaded
            ahead = self.placement.readahead(self.quantization_config.readahead_bytes)
            attach_pools(model, self.placement.budgets, readahead_nbytes=ahead)
        if offloaded_parameters(model) or self._placement.moves:
            hold_in_place(model)
        if self._placement.moves:
            align_inputs(model, self._placement, model._skip_keys_device_placement)
        # Saving reverses what loading did to names; the parts of packed weights are no part of that.
        rules: Any = model._weight_conversions
        model._weight_conversions = [rule for rule in rules if not is_ours(rule)]  # type: ignore[assignment]
        adopt(model)
        self._warn_if_little(coverage_of(model, self.plan))
        return model

    def _warn_if_little(self, report: CoverageReport) -> None:
        config = self.quantization_config
        if config.weights != NOT_QUANTIZED and not self.pre_quantized and report.share < COVERAGE_THRESHOLD:
            warnings.warn(
                f"only {report.share:.0%} of the values that could be quantized are: "
                f"{'; '.join(report.main_reasons())}. model.t2n_report() lists all of them",
                stacklevel=2,
            )

    # ---- afterwards -----------------------------------------------------------------------------------------------

    def get_state_dict_and_metadata(self, model: "PreTrainedModel") -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Give packed weights as plain tensors; config.json, which is written next, says what they are."""
        tensors, forms = packed_state_dict(model)
        described = forms.to_json() or None
        self.quantization_config.tensors = described
        saved_config = getattr(model.config, "quantization_config", None)
        if saved_config is not None:  # it is left out of the config while nothing is packed
            saved_config.tensors = described
        return tensors, {}

    def _dequantize(self, model: "PreTrainedModel", dtype: torch.dtype | None = None) -> "PreTrainedModel":
        return materialize(model)

    def is_serializable(self) -> bool:
        """Packed models can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters beside packed weights can be trained: gradients pass through them. They themselves are fixed."""
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> "T2NQuantizer":
        """Copy what describes the model; a load that is going on belongs to the original."""
        copied = object.__new__(T2NQuantizer)
        memo[id(self)] = copied
        copied.__dict__.update(self.__dict__)
        copied.quantization_config = copy.deepcopy(self.quantization_config, memo)
        copied._placing = None
        return copied


def _is_without_values(device_map: object) -> bool:
    """Say whether only names and shapes are to be loaded, device_map="meta": then nothing is put anywhere."""
    return isinstance(device_map, dict) and list(device_map) == [""] and str(device_map[""]) == "meta"


def register() -> None:
    """Make transformers know T2NConfig and its quantizer. Doing it again, also after a reload, changes nothing else."""
    registries: tuple[tuple[Mapping[str, Any], Any, type], ...] = (
        (AUTO_QUANTIZATION_CONFIG_MAPPING, register_quantization_config, T2NConfig),
        (AUTO_QUANTIZER_MAPPING, register_quantizer, T2NQuantizer),
    )
    for known, add, cls in registries:
        present = known.get(QUANT_METHOD)
        if present is cls:
            continue
        if present is not None:
            if (present.__module__, present.__qualname__) != (cls.__module__, cls.__qualname__):
                raise T2NError(f"quant_method {QUANT_METHOD!r} belongs to {present.__module__}.{present.__qualname__}")
            del known[QUANT_METHOD]  # type: ignore[attr-defined]
        add(QUANT_METHOD)(cls)
