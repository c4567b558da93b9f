"""Ling 3's config.json and files: the authors' keys and names, and what transformers' Bailing models do not have."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.models.config import ModelConfig, ModelError
from baton.models.families.bailing_hybrid import build, read_layers, read_lower_bound, read_rotate
from baton.models.families.kimi_linear import KimiMixture
from tests.models.loading.test_loading import assert_loads_alike, copied, load, run
from tests.models.oracle import BAILING, Oracle

AUTHORS = {
    "word_embeddings.": "embed_tokens.", ".attention.": ".self_attn.", ".self_attn.dense.": ".self_attn.o_proj.",
    ".expert_bias": ".e_score_correction_bias", ".f_proj.": ".forget_gate.f_proj.", ".A_log": ".forget_gate.A_log",
    ".dt_bias": ".forget_gate.dt_bias",
}  # fmt: skip
"""Parts of names in the authors' files → in a model of transformers."""
ATTENTION = "model.layers.2.attention."


def test_names_of_the_authors_and_of_transformers_fill_the_same(oracle: Oracle, tmp_path: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        assert "model.word_embeddings.weight" in tensors and f"{ATTENTION}dense.weight" in tensors
        for name in list(tensors):
            other = name
            for part, new in AUTHORS.items():
                other = other.replace(part, new)
            tensors[other] = tensors.pop(name)

    original = oracle.checkpoint("bailing_hybrid")
    assert_loads_alike(copied(original, tmp_path / "copy", tensors=rename), original)


def test_layers_that_predict_further_tokens_are_left_out(oracle: Oracle, tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.2.")}
        tensors |= {name.replace(".2.", ".3."): tensor.clone() for name, tensor in last.items()}
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)

    original = oracle.checkpoint("bailing_hybrid")
    assert_loads_alike(copied(original, tmp_path / "copy", tensors=add), original)


def test_queries_from_a_latent_are_rotated_alike(oracle: Oracle, tmp_path: Path) -> None:
    """With normed inputs, a latent of the inputs themselves changes nothing: its norm is the identity."""
    norm, original = "model.layers.2.input_layernorm.weight", oracle.checkpoint("bailing_hybrid")

    def with_plain_norm(tensors: dict[str, torch.Tensor]) -> None:
        tensors[norm].fill_(1)

    def with_latent(tensors: dict[str, torch.Tensor]) -> None:
        with_plain_norm(tensors)
        tensors[f"{ATTENTION}q_b_proj.weight"] = tensors.pop(f"{ATTENTION}q_proj.weight")
        tensors[f"{ATTENTION}q_a_proj.weight"] = torch.eye(64)
        tensors[f"{ATTENTION}q_a_layernorm.weight"] = torch.ones(64)

    plain = copied(original, tmp_path / "plain", tensors=with_plain_norm)
    rank = {"q_lora_rank": 64}
    latent = copied(original, tmp_path / "latent", config=lambda config: config.update(rank), tensors=with_latent)
    torch.testing.assert_close(run(load(latent)), run(load(plain)), atol=1e-4, rtol=0)
    assert not torch.allclose(run(load(plain)), run(load(original)), atol=1e-2)


@pytest.mark.parametrize("keys", [{}, {"num_expert_group": 4, "num_experts_per_token": 6, "topk_group": 2}])
def test_experts_are_chosen_by_this_familys_defaults(keys: dict[str, int]) -> None:
    left_out = ("num_experts_per_tok", "n_group", "topk_group")
    values = {name: value for name, value in BAILING.items() if name not in left_out}
    with torch.device("meta"):
        model = build(ModelConfig({**values, "vocab_size": 9, "num_local_experts": 16, **keys}), *[torch.float32] * 2)
    [rule, _] = [part.gate.rule for part in model.modules() if isinstance(part, KimiMixture)]
    chosen = keys.get("num_experts_per_token", 8), keys.get("num_expert_group", 8), keys.get("topk_group", 4)
    assert (rule.top_k, rule.groups, rule.groups_kept, rule.scale, rule.renormalise) == (*chosen, 2.5, True)


def config(**changed: Any) -> ModelConfig:
    return ModelConfig({"num_hidden_layers": 6, "layer_group_size": 3, **changed})


def test_the_last_layer_of_each_group_has_attention() -> None:
    assert read_layers(config()) == ["linear_attention", "linear_attention", "full_attention"] * 2
    with pytest.raises(ModelError, match="num_hidden_layers = 7 should be a multiple of layer_group_size = 3"):
        read_layers(config(num_hidden_layers=7))


@pytest.mark.parametrize("bound", [0, 1.0, float("-inf"), True, "low"])
def test_a_bound_of_decays_is_below_0(bound: object) -> None:
    assert read_lower_bound(config(kda_lower_bound=-5)) == read_lower_bound(config()) == -5
    assert read_lower_bound(config(kda_safe_gate=False, kda_lower_bound=bound)) is None
    with pytest.raises(ModelError, match="kda_lower_bound should be a finite number below 0, not"):
        read_lower_bound(config(kda_lower_bound=bound))


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
        {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        {"rope_theta": 500.0, "rope_parameters": {"rope_theta": None, "rope_type": "default"}},
    ],
)
def test_all_of_the_shared_part_is_rotated(keys: dict[str, Any]) -> None:
    rotation = read_rotate(config(**keys), 8)
    assert (rotation.width, rotation.theta) == (8, 500)
    assert read_rotate(config(rope_theta=None), 8).theta == 6e6


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"expert_swiglu_limit_list": [None, 0, 7.0]}, "expert_swiglu_limit_list is not supported"),
        ({"share_expert_swiglu_limit_list": [1.0]}, "share_expert_swiglu_limit_list is not supported"),
        ({"architectures": ["BailingMoeV2_5ForCausalLM"]}, "architectures = .* is not supported"),
        ({"no_kda_lora": False}, "no_kda_lora = False is not supported"),
        ({"gated_attention_proj_granularity_type": "element_wise"}, "granularity_type = 'element_wise' is not supp"),
        ({"rope_interleave": False}, "rope_interleave = False is not supported"),
        ({"use_mla_nope": True}, "use_mla_nope = True is not supported"),
        ({"score_function": "softmax"}, "score_function = 'softmax' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2 is not supported"),
        ({"moe_shared_expert_intermediate_size": 48}, "moe_shared_expert_intermediate_size = 48 is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "only the default rotation is"),
    ],
)
def test_other_computations_are_refused(oracle: Oracle, tmp_path: Path, changed: dict[str, Any], fault: str) -> None:
    path = copied(oracle.checkpoint("bailing_hybrid"), tmp_path / "copy", config=lambda values: values.update(changed))
    with pytest.raises(ModelError, match=fault):
        load(path)


def test_limits_of_no_layer_are_none(oracle: Oracle, tmp_path: Path) -> None:
    original = oracle.checkpoint("bailing_hybrid")
    limits = {"expert_swiglu_limit_list": [0] * BAILING["num_hidden_layers"], "share_expert_swiglu_limit_list": None}
    assert_loads_alike(copied(original, tmp_path / "copy", config=lambda values: values.update(limits)), original)
