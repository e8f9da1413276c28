"""Plans of known models, by the names of their classes: neither transformers nor torchvision is imported.

A model of such a class, or one that contains such a model, needs no plan of its own. Models with heads have presets for
the head alone, so that a base model in a user's network is cut too.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.collective.module_names import matching

Plan = Mapping[str, Any]  # pattern of module names → a word, or several


class Preset(NamedTuple):
    plan: Plan
    sequence: Plan = MappingProxyType({})  # added by sequence_parallel
    optional: frozenset[str] = frozenset()  # patterns that not every model of the class has


_LLAMA = Preset(
    {
        "embed_tokens": "vocab",
        "layers.*.self_attn": "gather",
        "layers.*.self_attn.q_proj": "column:head_dim",
        "layers.*.self_attn.k_proj": "column:head_dim",
        "layers.*.self_attn.v_proj": "column:head_dim",
        "layers.*.self_attn.o_proj": "row",
        "layers.*.mlp": "gather",
        "layers.*.mlp.gate_proj": "column",
        "layers.*.mlp.up_proj": "column",
        "layers.*.mlp.down_proj": "row",
    },
    {"layers.*": "blocks", "layers.*.input_layernorm": "sequence", "layers.*.post_attention_layernorm": "sequence"},
)
_GPT2 = Preset(
    {
        "wte": "vocab",
        "h.*.attn": ["gather", "divide:split_size"],
        "h.*.attn.c_attn": "qkv:head_dim",
        "h.*.attn.c_proj": "row",
        "h.*.mlp": "gather",
        "h.*.mlp.c_fc": "column",
        "h.*.mlp.c_proj": "row",
    },
    {
        "h.*": "blocks",
        "h.*.ln_*": "sequence",
        "h.*.attn.resid_dropout": "sequence",
        "h.*.mlp.dropout": "sequence",
    },
)
_BERT = Preset(
    {
        "embeddings.word_embeddings": "vocab",
        "encoder.layer.*.attention.self": ["gather", "divide:num_attention_heads,all_head_size"],
        "encoder.layer.*.attention.self.query": "column:attention_head_size",
        "encoder.layer.*.attention.self.key": "column:attention_head_size",
        "encoder.layer.*.attention.self.value": "column:attention_head_size",
        "encoder.layer.*.attention.output.dense": "row",
        "encoder.layer.*.intermediate": "gather",
        "encoder.layer.*.intermediate.dense": "column",
        "encoder.layer.*.output.dense": "row",
    },
    {
        "encoder.layer.*": "blocks",
        "encoder.layer.*.attention.output.LayerNorm": "sequence",
        "encoder.layer.*.attention.output.dropout": "sequence",
        "encoder.layer.*.output.LayerNorm": "sequence",
        "encoder.layer.*.output.dropout": "sequence",
    },
)
_T5 = Preset(
    {
        "embed_tokens": "vocab",
        "block.*.layer.*.*Attention": ["gather", "divide:n_heads,inner_dim"],
        "block.*.layer.*.*Attention.q": "column:key_value_proj_dim",
        "block.*.layer.*.*Attention.k": "column:key_value_proj_dim",
        "block.*.layer.*.*Attention.v": "column:key_value_proj_dim",
        "block.*.layer.*.*Attention.o": "row",
        "block.*.layer.*.*Attention.relative_attention_bias": "column",
        "block.*.layer.*.DenseReluDense": "gather",
        "block.*.layer.*.DenseReluDense.wi": "column",
        "block.*.layer.*.DenseReluDense.wi_*": "column",
        "block.*.layer.*.DenseReluDense.wo": "row",
    },
    {"block.*": "blocks", "block.*.layer.*.layer_norm": "sequence", "block.*.layer.*.dropout": "sequence"},
    optional=frozenset({"block.*.layer.*.DenseReluDense.wi", "block.*.layer.*.DenseReluDense.wi_*"}),
)
_VIT = Preset(
    {
        "encoder.layers.*.self_attention": "heads",
        "encoder.layers.*.mlp.0": "column",
        "encoder.layers.*.mlp.3": "row",
    }
)

PRESETS: Mapping[str, Preset] = {
    "LlamaModel": _LLAMA,
    "Qwen2Model": _LLAMA,
    "GPT2Model": _GPT2,
    "BertModel": _BERT,
    "T5Stack": _T5,
    "VisionTransformer": _VIT,
    **dict.fromkeys(("LlamaForCausalLM", "Qwen2ForCausalLM", "GPT2LMHeadModel"), Preset({"lm_head": "vocab"})),
    **dict.fromkeys(
        ("BertForMaskedLM", "BertForPreTraining", "BertLMHeadModel"), Preset({"cls.predictions.decoder": "vocab"})
    ),
    **dict.fromkeys(("T5Model", "T5EncoderModel"), Preset({"shared": "vocab"})),
    "T5ForConditionalGeneration": Preset({"shared": "vocab", "lm_head": "vocab"}),
}


def preset_of(model: torch.nn.Module, sequence: bool) -> dict[str, Any]:
    """The plans of all known models in `model` as one plan, with full names; {} if `model` contains no known model."""
    found: dict[str, Any] = {}
    can_cut_sequence = False
    for name, module in model.named_modules():
        preset = next((PRESETS[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in PRESETS), None)
        if preset is None:
            continue
        can_cut_sequence |= bool(preset.sequence)
        prefix = name + "." if name else ""
        names = [inside for inside, _ in module.named_modules(remove_duplicate=False)]
        for pattern, words in {**preset.plan, **(preset.sequence if sequence else {})}.items():
            if _is_there(pattern, names, preset, type(module).__name__):
                found[prefix + pattern] = words
    if found and sequence and not can_cut_sequence:
        raise StrategyError(
            f"tensor_parallel_configs['sequence_parallel']=True: the preset of {type(model).__name__} does not cut "
            "sequences. Leave it out."
        )
    return found


def _is_there(pattern: str, names: list[str], preset: Preset, kind: str) -> bool:
    try:
        return bool(matching(pattern, names, f"the preset of {kind}"))
    except ModelError as error:
        if pattern in preset.optional:
            return False
        raise ModelError(
            f"{error} This version of its library has other names: give tensor_parallel_configs['plan']."
        ) from None
