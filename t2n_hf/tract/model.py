"""A causal language model that tract runs, with the `generate()` of transformers."""

import os
from collections.abc import Mapping
from typing import Any, ClassVar, final

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from t2n_hf.errors import ConfigError
from t2n_hf.tract.generating import TractGenerator, refuse_unknown_tokens
from t2n_hf.tract.loading import archive_of, export_folder, generation_config_of
from t2n_hf.tract.past import IDS, LOGITS, MASK, Past
from t2n_hf.tract.runner import TractRunner

__all__ = ["TractModelForCausalLM"]


@final
class TractModelForCausalLM(TractGenerator):
    """An exported model, in a worker process that also keeps the key/value cache.

    `generate()` takes the whole conversation each time; the tokens that the worker has seen already, from the start on,
    are not computed again. Greedy search and sampling, of one sequence; of several when the archive was exported with
    `batch`, padded on the left when it was exported with `mask`. Close it, or use it as a context manager.
    """

    main_input_name: ClassVar[str] = "input_ids"
    _supported_generation_modes: ClassVar[list[str]] = [GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE]

    def __init__(
        self,
        runner: TractRunner,
        config: PreTrainedConfig,
        generation_config: GenerationConfig,
        *,
        max_context: int | None = None,
    ) -> None:
        if IDS not in runner.inputs or LOGITS not in runner.outputs:
            raise ConfigError(
                f"{runner.archive} is no causal language model: its first input is {next(iter(runner.inputs), None)}, "
                f"its first output {next(iter(runner.outputs), None)}; expected {IDS} and {LOGITS} among them"
            )
        super().__init__(runner, config, generation_config, max_context)
        self._past = Past(runner, switch=_rope_switch(config))

    @classmethod
    def from_pretrained(
        cls,
        export: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        verify: bool = True,
        timeout_s: float | None = None,
    ) -> "TractModelForCausalLM":
        """Load an export folder, or an export on the Hub.

        Args:
            export: folder that `export_nnef` wrote, or the id of a repository that `push_nnef_to_hub` filled.
            revision: branch, tag or commit on the Hub.
            token: token for the Hub; None uses the one that is stored.
            verify: hold every file against the sha256 of the export's manifest first.
            timeout_s: longest time for one call of tract; None waits for ever.

        Raises:
            TractError: tract is missing, or refuses the archive.
            StorageError: there is no export.
            HubError: the Hub does not give it.
            ArchiveError: a file is not what the manifest says.
            ConfigError: the export is no causal language model.
        """
        folder = export_folder(export, revision, token)
        archive, max_context = archive_of(folder, verify)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        runner = TractRunner(archive, timeout_s=timeout_s)
        try:
            return cls(runner, config, generation_config_of(folder, config), max_context=max_context)
        except BaseException:
            runner.close()
            raise

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **_ignored: Any,  # noqa: ANN401 - whatever generate() passes to every model
    ) -> CausalLMOutputWithPast:
        """Logits after the whole sequences `input_ids` [B, S] i64: of the last position, [B, 1, V].

        An archive with all logits gives those of every position that had to be computed. With `use_cache`, positions
        that agree with what the worker has seen are not computed again; without, everything is.

        `attention_mask` [B, S] is 0 where a token is padding; None is no padding.

        Raises ConfigError for a batch or padding that the archive was not exported for, tokens that the model lacks, or
        a sequence longer than the archive's context.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        self._check_shapes(input_ids, mask)
        self._check_length(input_ids.shape[1])
        refuse_unknown_tokens(IDS, input_ids, self._vocabulary)
        if not use_cache:
            self._past.reset()
        logits = self._past.advance(*(x.to("cpu", torch.int64).numpy() for x in (input_ids, mask)))
        return CausalLMOutputWithPast(logits=torch.from_numpy(logits))

    def reset(self) -> None:
        """Forget the conversation: the next call computes everything."""
        self._past.reset()

    def close(self) -> None:
        """End the worker process."""
        self._decoder.close()

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = True,
        **_ignored: Any,  # noqa: ANN401
    ) -> dict[str, Any]:
        """Pass the whole sequence on every step: `forward` knows what is new in it.

        Raises ConfigError for padding at the end, which the new token would follow.
        """
        if attention_mask is not None and MASK in self._decoder.inputs and attention_mask.ndim == 2:
            padded = (attention_mask[:, -1] == 0).nonzero().flatten().tolist()
            if padded:
                raise ConfigError(
                    f"attention_mask is 0 at the last token of rows {padded}: a sequence goes on after its last token, "
                    "so that padding is on the left; tokenize with padding_side='left'"
                )
        return {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": use_cache}

    def _check_shapes(self, input_ids: torch.Tensor, mask: torch.Tensor) -> None:
        if input_ids.ndim != 2 or (input_ids.shape[0] != 1 and self._decoder.inputs[IDS].shape[0] == 1):
            raise ConfigError(
                f"input_ids of shape {list(input_ids.shape)}: this archive runs one sequence at a time, [1, S]; call "
                "generate() once per sequence, with num_return_sequences=1, or export with batch=True"
            )
        if mask.shape != input_ids.shape:
            raise ConfigError(
                f"attention_mask of shape {list(mask.shape)} for input_ids of shape {list(input_ids.shape)}; expected "
                "one number for each token"
            )
        if MASK not in self._decoder.inputs and not bool(mask.all()):
            raise ConfigError(
                "attention_mask has zeros: this archive takes sequences without padding; export with mask=True"
            )


def _rope_switch(config: PreTrainedConfig) -> int | None:
    """Length up to which a LongRoPE model uses its short factors; None for other models."""
    # hf.capturable.rotary.rope_switch asks the same; rooms on one line do not import each other.
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        if parameters.get("rope_type") == "longrope":
            return int(parameters["original_max_position_embeddings"])
    return None
