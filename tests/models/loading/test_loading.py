import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from baton.models.batch import Batch, Model, Prefill, allocate
from baton.models.config import UNLIMITED, ModelError
from baton.models.loading.checkpoint import load_model, random_model
from tests.models.oracle import Oracle

CPU = torch.device("cpu")
Change = Callable[[dict[str, Any]], None]


def load(path: Path, dtype: torch.dtype | None = None) -> Model:
    return load_model(path, dtype, CPU)


def run(model: Model) -> Tensor:
    tokens = torch.arange(24) * 7
    pools = allocate(model, 1, 2, 16, CPU)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    hidden = model.forward(Batch(tokens, torch.arange(24), Prefill([0, 24], [0], [0], [], table), None), pools)
    return model.logits(hidden)


def copied(source: Path, target: Path, config: Change | None = None, tensors: Change | None = None) -> Path:
    """Return a copy of a checkpoint with a changed config and changed tensors."""
    shutil.copytree(source, target)
    if config:
        values = json.loads((target / "config.json").read_text())
        config(values)
        (target / "config.json").write_text(json.dumps(values))
    if tensors:
        held = load_file(target / "model.safetensors")
        tensors(held)
        save_file(held, target / "model.safetensors")
    return target


def assert_loads_alike(path: Path, original: Path) -> None:
    torch.testing.assert_close(run(load(path)), run(load(original)), atol=0, rtol=0)


@pytest.mark.parametrize("name", ["mamba2", "nemotron_h", "granitemoehybrid-rope"])
def test_shards_load_like_one_file(oracle: Oracle, name: str) -> None:
    sharded = oracle.checkpoint(name, max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert_loads_alike(sharded, oracle.checkpoint(name))


def test_shards_without_an_index_are_all_read(oracle: Oracle, tmp_path: Path) -> None:
    path = copied(oracle.checkpoint("mamba2", max_shard_size="40KB"), tmp_path / "copy")
    (path / "model.safetensors.index.json").unlink()
    assert_loads_alike(path, oracle.checkpoint("mamba2"))


def hub_mamba2(config: dict[str, Any]) -> None:
    config.update(torch_dtype=config.pop("dtype"), time_step_limit=[0.0, float("inf")])


def hub_nemotron_h(config: dict[str, Any]) -> None:
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in config.pop("layers_block_type"))
    config.update(attention_head_dim=config.pop("head_dim"), rms_norm_eps=config.pop("layer_norm_epsilon"))
    config.update(torch_dtype=config.pop("dtype"), time_step_limit=[0.0, float("inf")])


def hub_granite(config: dict[str, Any]) -> None:
    named = {"linear_attention": "mamba", "full_attention": "attention"}
    config["layer_types"] = [named[kind] for kind in config["layer_types"]]
    config.update(rope_theta=config.pop("rope_parameters")["rope_theta"], rope_scaling=None)
    config.update(torch_dtype=config.pop("dtype"), mamba_d_head="auto")
    del config["time_step_limit"]


def hub_bamba(config: dict[str, Any]) -> None:
    config.update(rope_theta=config.pop("rope_parameters")["rope_theta"], rope_scaling=None, attn_rotary_emb=12)
    config.update(torch_dtype=config.pop("dtype"), mamba_d_head="auto")


def hub_falcon_h1(config: dict[str, Any]) -> None:
    config.update(rope_theta=config.pop("rope_parameters")["rope_theta"], rope_scaling=None)
    config.update(torch_dtype=config.pop("dtype"), mamba_expand=2)


def hub_qwen3_next(config: dict[str, Any]) -> None:
    config.update(full_attention_interval=2, layer_types=None, torch_dtype=config.pop("dtype"), rope_scaling=None)
    config.update(config.pop("rope_parameters"))
    del config["rope_type"]


def hub_lfm2(config: dict[str, Any]) -> None:
    attending = [layer for layer, kind in enumerate(config.pop("layer_types")) if kind == "full_attention"]
    config.update(full_attn_idxs=attending, block_ff_dim=config["intermediate_size"], intermediate_size=8)
    config.update(tie_embedding=config.pop("tie_word_embeddings"), torch_dtype=config.pop("dtype"))
    config.update(rope_theta=config.pop("rope_parameters")["rope_theta"])


def hub_lfm3(config: dict[str, Any]) -> None:
    """Call the partial rotation "default", and leave out what has its default value."""
    assert config["rope_parameters"]["full_attention"]["rope_type"] == "proportional"
    config["rope_parameters"]["full_attention"]["rope_type"] = "default"
    del config["use_sandwich_norm"], config["use_attention_gate"], config["tie_word_embeddings"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mamba2", hub_mamba2),
        ("nemotron_h", hub_nemotron_h),
        ("nemotron_h-moe", hub_nemotron_h),
        ("granitemoehybrid-rope", hub_granite),
        ("bamba-groups", hub_bamba),
        ("falcon_h1", hub_falcon_h1),
        ("qwen3_next-odd", hub_qwen3_next),
        ("lfm2", hub_lfm2),
        ("lfm2-odd", hub_lfm2),
        ("lfm3", hub_lfm3),
    ],
)
def test_hub_style_config_loads_like_the_saved_style(oracle: Oracle, tmp_path: Path, name: str, change: Change) -> None:
    original = oracle.checkpoint(name)
    assert_loads_alike(copied(original, tmp_path / "copy", config=change), original)


def rename_like_codestral(tensors: dict[str, Any]) -> None:
    for name in list(tensors):
        tensors["model." + name.replace("embeddings.", "embedding.")] = tensors.pop(name)


def state_spaces(config: dict[str, Any]) -> None:
    old = dict(config)
    config.clear()
    ssm = {"layer": "Mamba2", "headdim": old["head_dim"], "d_state": old["state_size"], "chunk_size": 16}
    config.update(d_model=64, n_layer=2, vocab_size=old["vocab_size"] - 3, ssm_cfg=ssm, pad_vocab_size_multiple=16)


def test_original_mamba2_names_and_configs(oracle: Oracle, tmp_path: Path) -> None:
    original = oracle.checkpoint("mamba2")
    renamed = copied(original, tmp_path / "renamed", tensors=rename_like_codestral)
    assert_loads_alike(renamed, original)
    native = copied(original, tmp_path / "native", config=state_spaces, tensors=rename_like_codestral)
    assert_loads_alike(native, original)


def test_mistral_params_json(oracle: Oracle, tmp_path: Path) -> None:
    original = oracle.checkpoint("mamba2-groups")

    def widen(config: dict[str, Any]) -> None:
        config.update(head_dim=64, num_heads=3, state_size=128, chunk_size=256)

    wide = json.loads((original / "config.json").read_text())
    widen(wide)
    model = random_model(wide, torch.float32, CPU, seed=0)
    assert isinstance(model, nn.Module)
    path = copied(original, tmp_path / "copy", config=widen)
    save_file(model.state_dict(), path / "model.safetensors")
    params = tmp_path / "params"
    params.mkdir()
    save_file({f"model.{k}": v for k, v in model.state_dict().items()}, params / "consolidated.safetensors")
    native = {"dim": 96, "n_layers": 2, "vocab_size": 272, "n_groups": 3, "tie_embeddings": False}
    (params / "params.json").write_text(json.dumps({**native, "model_type": "mamba", "pad_vocab_size_multiple": 1}))
    assert_loads_alike(params, path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "mamba", "dim": 96, "n_layers": 2}, "lacks vocab_size"),
        ({"ssm_cfg": {"layer": "Mamba2"}, "attn_layer_idx": [1]}, r"attn_layer_idx = \[1\] is not supported"),
        ({"ssm_cfg": {"layer": "Mamba2"}, "rms_norm": False}, "rms_norm = False is not supported"),
        ({"ssm_cfg": {"layer": "Mamba2", "D_has_hdim": True}}, "D_has_hdim = True is not supported"),
        ({"ssm_cfg": {"layer": "Mamba2", "d_ssm": 64}}, "d_ssm = 64 is not supported"),
        ({"ssm_cfg": "Mamba2"}, "model_type None is not supported"),
    ],
)
def test_original_configs_name_what_they_lack(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    (tmp_path / "params.json").write_text(json.dumps({"d_model": 64, "n_layer": 2} | values))
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_layers_for_multi_token_prediction_are_left_out(oracle: Oracle, tmp_path: Path) -> None:
    original = oracle.checkpoint("nemotron_h")

    def add(tensors: dict[str, Any]) -> None:
        tensors["mtp.layers.0.norm.weight"] = torch.ones(3)

    assert_loads_alike(copied(original, tmp_path / "copy", tensors=add), original)


@pytest.mark.parametrize("differs", [False, True])
def test_tied_head_may_be_repeated_but_not_differ(oracle: Oracle, tmp_path: Path, differs: bool) -> None:
    original = oracle.checkpoint("granitemoehybrid")

    def repeat(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + float(differs)

    path = copied(original, tmp_path / "copy", tensors=repeat)
    if differs:
        with pytest.raises(ModelError, match=r"tie_word_embeddings, but lm_head\.weight differs"):
            load(path)
    else:
        assert_loads_alike(path, original)


def test_dtype_is_the_checkpoints_by_default(oracle: Oracle, tmp_path: Path) -> None:
    path = copied(oracle.checkpoint("nemotron_h"), tmp_path / "copy", config=lambda c: c.update(dtype="bfloat16"))
    dtypes = {name: p.dtype for name, p in parameters(load(path)).items()}
    float32_names = {"A_log", "D", "dt_bias"}
    assert {d for n, d in dtypes.items() if n.rpartition(".")[2] in float32_names} == {torch.float32}
    assert {d for n, d in dtypes.items() if n.rpartition(".")[2] not in float32_names} == {torch.bfloat16}
    assert {p.dtype for p in parameters(load(path, torch.float32)).values()} == {torch.float32}


def parameters(model: Model) -> dict[str, nn.Parameter]:
    assert isinstance(model, nn.Module)
    return dict(model.named_parameters())


def test_progress_counts_bytes_up_to_the_total(oracle: Oracle) -> None:
    path = oracle.checkpoint("mamba2", max_shard_size="40KB")
    reports: list[tuple[int, int]] = []
    load_model(path, None, CPU, lambda done, total: reports.append((done, total)))
    total = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert {of for _, of in reports} == {total}
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[-1] == (total, total)


def test_positions_are_limited_by_the_config_or_not_at_all(oracle: Oracle) -> None:
    limits = {name: load(oracle.checkpoint(name)).max_position for name in ("mamba2", "nemotron_h", "granitemoehybrid")}
    assert limits == {"mamba2": UNLIMITED, "nemotron_h": 4096, "granitemoehybrid": 4096}


def test_random_model_depends_on_the_seed() -> None:
    config = {"model_type": "mamba2", "hidden_size": 32, "num_heads": 4, "head_dim": 16, "num_hidden_layers": 2}
    config |= {"n_groups": 1, "vocab_size": 50, "state_size": 8}
    first, again, other = (run_small(random_model(config, torch.float32, CPU, seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.isfinite().all() and first.std() > 0.1


def run_small(model: Model) -> Tensor:
    batch = Batch(torch.arange(9), torch.arange(9), Prefill([0, 9], [0], [0], [], torch.zeros(1, 1)), None)
    return model.logits(model.forward(batch, allocate(model, 1, 0, 16, CPU)))


def test_hash_family_needs_no_weights(tmp_path: Path) -> None:
    config = {"model_type": "hash", "vocab_size": 97, "chunk_size": 8, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).vocab_size == 97


def lfm3_rotation(**changes: object) -> dict[str, Any]:
    """Return the setting of an LFM3 whose layers with windows have another rotation."""
    full = {"rope_type": "default", "rope_theta": 1e6}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": {**full, **changes}}}


CONFIG_REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("mamba2", {"model_type": "llama"}, r"model_type 'llama' is not supported \(supported: mamba2, nemotron_h, granit"),
    ("mamba2", {"model_type": None}, "model_type None"),
    ("mamba2", {"quantization_config": {"quant_method": "hqq"}}, "quantization_config 'hqq' is not supported"),
    ("mamba2", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    ("mamba2", {"num_heads": None}, "lacks num_heads"),
    ("mamba2", {"num_heads": "eight"}, "num_heads should be an integer, not 'eight'"),
    ("mamba2", {"num_heads": 9}, "num_heads · head_dim = 144"),
    ("mamba2", {"layer_norm_epsilon": [1]}, r"layer_norm_epsilon should be a number, not \[1\]"),
    ("mamba2", {"use_bias": "no"}, "use_bias should be true or false"),
    ("mamba2", {"time_step_limit": [0.0]}, "time_step_limit should be a pair of numbers"),
    ("nemotron_h", {"layers_block_type": ["moe", "mlp"], "moe_intermediate_size": None}, "lacks moe_intermediate_size"),
    ("nemotron_h-moe", {"n_routed_experts": None}, "lacks n_routed_experts"),
    ("nemotron_h-moe", {"n_shared_experts": 2}, "n_shared_experts = 2 is not supported"),
    ("nemotron_h-moe", {"num_experts_per_tok": 9}, "a token cannot have 9 of 8 experts"),
    ("nemotron_h-moe", {"n_group": 3}, "8 experts cannot lie in 3 groups evenly"),
    ("nemotron_h-moe", {"n_group": 4, "topk_group": 5}, "5 of 4 groups of experts cannot be kept"),
    ("nemotron_h-moe", {"n_group": 4}, "1 groups of 2 experts hold fewer than 3"),
    ("nemotron_h", {"layers_block_type": None}, "lacks hybrid_override_pattern"),
    ("nemotron_h", {"layers_block_type": "M*"}, "layers_block_type should be a list of strings"),
    ("nemotron_h", {"layers_block_type": ["mlp", "conv"]}, "unknown layers conv"),
    ("nemotron_h", {"sliding_window": 512}, "sliding_window = 512 is not supported"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu' is not supported"),
    ("mamba2", {"chunk_size": 0}, "chunk_size should be from 1 to 2147483647, not 0"),
    ("mamba2", {"chunk_size": -256}, "chunk_size should be from 1 to 2147483647, not -256"),
    ("mamba2", {"num_hidden_layers": 0}, "num_hidden_layers should be from 1"),
    ("mamba2", {"vocab_size": -512}, "vocab_size should be from 1"),
    ("mamba2", {"hidden_size": 10**30}, "hidden_size should be from 1"),
    ("mamba2", {"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon should be finite and above 0, not nan"),
    ("mamba2", {"time_step_limit": [float("nan"), 1.0]}, "time_step_limit should be two numbers from 0 up"),
    ("mamba2", {"time_step_limit": [0.5, 0.1]}, "time_step_limit should be two numbers from 0 up"),
    ("mamba2", {"n_groups": 3}, "8 Mamba-2 heads cannot share 3 groups evenly"),
    ("nemotron_h", {"num_attention_heads": -4}, "num_attention_heads should be from 1"),
    ("nemotron_h", {"num_key_value_heads": 3}, "should be a multiple of num_key_value_heads = 3"),
    ("nemotron_h", {"max_position_embeddings": 0}, "max_position_embeddings should be from 1"),
    ("nemotron_h", {"layers_block_type": []}, "there are no layers"),
    ("granitemoehybrid", {"layer_types": ["mamba"] * 3, "mamba_chunk_size": 0}, "mamba_chunk_size should be from 1"),
    ("granitemoehybrid", {"residual_multiplier": float("inf")}, "residual_multiplier should be finite and above 0"),
    ("granitemoehybrid", {"logits_scaling": 0.0}, "logits_scaling should be finite and above 0, not 0.0"),
    ("granitemoehybrid", {"embedding_multiplier": "NaN"}, "embedding_multiplier should be finite and above 0"),
    ("granitemoehybrid-rope", {"head_dim": 5}, "head_dim = 5 cannot be rotated"),
    ("granitemoehybrid", {"shared_intermediate_size": 0}, "leave layers without MLPs"),
    ("granitemoehybrid-moe", {"num_experts_per_tok": 7}, "a token cannot have 7 of 6 experts"),
    ("granitemoehybrid", {"layer_types": ["mamba", "conv", "mamba"]}, "unknown layers conv"),
    ("granitemoehybrid", {"layer_types": ["attention"] * 3}, "no layer has a recurrent state"),
    ("granitemoehybrid", {"mamba_d_head": 8}, "mamba_n_heads · mamba_d_head = 64"),
    ("lfm2", {"layer_types": ["mamba"] * 3}, "unknown layers mamba"),
    ("lfm2", {"layer_types": None}, "no layer has a recurrent state"),
    ("lfm2", {"layer_types": None, "full_attn_idxs": [3]}, "full_attn_idxs should be a list of integers from 0 to 2"),
    ("lfm3", {"layer_types": ["conv"] * 4 + ["chunked_attention"]}, "unknown layers chunked_attention"),
    ("lfm3", {"layer_types": ["sliding_attention"] * 5}, "no layer has a recurrent state"),
    ("lfm3", {"sliding_window": None}, "sliding_window should be an integer, not null"),
    ("lfm3", {"sliding_window": 0}, "sliding_window should be from 1"),
    ("lfm3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling is not supported"),
    (
        "lfm3",
        {"rope_parameters": {"rope_theta": 1e6}},
        r"rope_parameters\.full_attention should be an object, not None",
    ),
    (
        "lfm3",
        lfm3_rotation(rope_type="yarn"),
        r"rope_parameters\.sliding_attention\.rope_type = 'yarn' is not supported",
    ),
    ("lfm3", lfm3_rotation(factor=2.0), r"rope_parameters\.sliding_attention\.factor is not supported"),
    ("lfm3", lfm3_rotation(rope_theta=None), r"lacks rope_parameters\.sliding_attention\.rope_theta"),
    ("lfm3", lfm3_rotation(partial_rotary_factor=1.5), r"partial_rotary_factor = 1\.5 should be at most 1"),
    (
        "lfm3",
        {**lfm3_rotation(), "partial_rotary_factor": 0.5},
        r"partial_rotary_factor is not supported: only rope_parameters\.full_attention\.partial_rotary_factor is",
    ),
    ("lfm3", {"head_dim": 15}, "head_dim = 15 even"),
    ("lfm2_moe", {"num_experts_per_tok": 7}, "a token cannot have 7 of 6 experts"),
    ("qwen3_next", {"num_experts": None}, "lacks num_experts"),
    (
        "qwen3_next",
        {"linear_num_value_heads": 3},
        "should be a multiple of linear_num_key_heads = 2",
    ),
    ("qwen3_next", {"layer_types": ["conv"] * 4}, "unknown layers conv"),
    ("qwen3_next", {"layer_types": []}, "layer_types names 0 layers, not num_hidden_layers = 4"),
    ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate = False is not supported"),
    ("qwen3_next", {"head_dim": 6}, "head_dim = 6 · partial_rotary_factor 0.25 cannot be rotated"),
    ("qwen3_next", {"rope_parameters": {"rope_type": "yarn"}}, "only the default rotation is"),
    ("qwen3_5", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "only the default rotation is"),
    ("qwen3_5", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "only the default rotation is"),
    ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob = False is not supported"),
    ("qwen3_5_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\] is not supported"),
    ("qwen3_5_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported"),
    ("kimi_linear", {"gate_lower_bound": -5.0}, "gate_lower_bound = -5.0 is not supported"),
    ("kimi_linear", {"linear_attn_config": {"gate_lower_bound": -5.0}}, "gate_lower_bound = -5.0 is not supported"),
    ("olmo_hybrid", {"rope_parameters": None}, "lacks rope_theta: a number, or null if positions are not encoded"),
    ("olmo_hybrid", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "only the default rotation is"),
    ("olmo_hybrid", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    ("olmo_hybrid", {"linear_num_value_heads": 6}, "should be a multiple of linear_num_key_heads = 4"),
    ("olmo_hybrid", {"linear_allow_neg_eigval": 2}, "linear_allow_neg_eigval should be true or false"),
    ("nemotron_h", {"mamba_dt_limit": [0.5, 0.1]}, "mamba_dt_limit should be two numbers from 0 up"),
    ("qwen3_next-moe", {"num_experts_per_tok": 6}, "a token cannot have 6 of 5 experts"),
    ("qwen3_next-experts", {"mlp_only_layers": [2]}, "mlp_only_layers should be a list of integers from 0 to 1"),
    ("qwen3_5", {"text_config": [1]}, "text_config should hold an object"),
    ("qwen3_5_moe", {"num_experts": -1}, "num_experts should be from 0"),
    ("bamba", {"attn_layer_indices": [3]}, "attn_layer_indices should be a list of integers from 0 to 2, not"),
    ("bamba", {"attn_layer_indices": [True]}, "attn_layer_indices should be a list of integers"),
    ("bamba", {"attn_layer_indices": 1}, "attn_layer_indices should be a list of integers"),
    ("bamba", {"head_dim": 6}, "head_dim = 6 · partial_rotary_factor 0.5 cannot be rotated"),
    ("bamba", {"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor 2.0 cannot be rotated"),
    ("bamba", {"mamba_expand": 3}, "mamba_n_heads · mamba_d_head = 128, but the inner size is 192"),
    ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers should be 2 finite numbers above 0, not"),
    ("falcon_h1", {"ssm_multipliers": [1, 1, 0, 1, 1]}, "ssm_multipliers should be 5 finite numbers above 0, not"),
    ("falcon_h1", {"ssm_multipliers": 2.0}, "ssm_multipliers should be 5 finite numbers above 0, not"),
    ("falcon_h1", {"mamba_d_ssm": 64}, "mamba_n_heads · mamba_d_head = 80, but the inner size is 64"),
    ("falcon_h1", {"attn_layer_indices": [0]}, "attn_layer_indices = .* is not supported"),
    ("falcon_h1", {"rope_parameters": "linear"}, "only the default rotation is"),
    (
        "granitemoehybrid-rope",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        "only the default rotation is",
    ),
]


@pytest.mark.parametrize(("name", "change", "message"), CONFIG_REFUSALS, ids=[row[2][:30] for row in CONFIG_REFUSALS])
def test_config_is_refused(oracle: Oracle, tmp_path: Path, name: str, change: dict[str, Any], message: str) -> None:
    path = copied(oracle.checkpoint(name), tmp_path / "copy", config=lambda config: config.update(change))
    with pytest.raises(ModelError, match=message):
        load(path)


LAYER_COUNTS: list[tuple[str, dict[str, Any], str]] = [
    ("granitemoehybrid", {"num_hidden_layers": 4}, "layer_types names 3 layers, not num_hidden_layers = 4"),
    (
        "granitemoehybrid",
        {"layers_block_type": ["mamba"] * 2, "layer_types": None},
        "layers_block_type names 2 layers, not num_hidden_layers = 3",
    ),
    (
        "granitemoehybrid",
        {"layers_block_type": ["mamba"] * 2},
        "layers_block_type names 2 layers, not num_hidden_layers = 3",
    ),
    ("nemotron_h", {"num_hidden_layers": 6}, "layers_block_type names 5 layers, not num_hidden_layers = 6"),
    (
        "nemotron_h",
        {"num_hidden_layers": 3, "layers_block_type": None, "hybrid_override_pattern": "M-*M"},
        "hybrid_override_pattern names 4 layers, not num_hidden_layers = 3",
    ),
    (
        "nemotron_h",
        {"hybrid_override_pattern": "M-*M"},
        "hybrid_override_pattern names 4 layers, not the 5 of layers_block_type",
    ),
    ("nemotron_h", {"hybrid_override_pattern": "M-*MM"}, "name different layers"),
    ("qwen3_next", {"num_hidden_layers": 3}, "layer_types names 4 layers, not num_hidden_layers = 3"),
    ("qwen3_next-groups", {"layer_types": ["linear_attention"] * 4}, "layer_types names 4 layers"),
    ("qwen3_5", {"num_hidden_layers": 2}, "layer_types names 4 layers, not num_hidden_layers = 2"),
    ("qwen3_5_text", {"num_hidden_layers": 5}, "layer_types names 4 layers, not num_hidden_layers = 5"),
    ("qwen3_5_moe", {"num_hidden_layers": 5}, "layer_types names 4 layers, not num_hidden_layers = 5"),
    ("kimi_linear", {"num_hidden_layers": 2}, "layer_types names 3 layers, not num_hidden_layers = 2"),
    ("kimi_linear", {"mlp_layer_types": ["dense"]}, "mlp_layer_types names 1 layers, not num_hidden_layers = 3"),
    ("olmo_hybrid", {"num_hidden_layers": 3}, "layer_types names 4 layers, not num_hidden_layers = 3"),
    ("bamba", {"layer_types": ["linear_attention"] * 2}, "layer_types names 2 layers, not num_hidden_layers = 3"),
    ("bamba", {"layer_types": ["linear_attention"] * 3}, "name different layers"),
    ("falcon_h1", {"layers_block_type": ["hybrid"]}, "layers_block_type names 1 layers, not num_hidden_layers = 2"),
    ("mamba2", {"layer_types": ["mamba"]}, "layer_types names 1 layers, not num_hidden_layers = 2"),
]


@pytest.mark.parametrize(("name", "change", "message"), LAYER_COUNTS)
def test_keys_that_disagree_on_the_layers_are_refused(
    oracle: Oracle, tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    path = copied(oracle.checkpoint(name), tmp_path / "copy", config=lambda config: config.update(change))
    with pytest.raises(ModelError, match=message):
        load(path)


def test_lists_of_layers_that_agree_are_accepted(oracle: Oracle, tmp_path: Path) -> None:
    more = {
        "nemotron_h": {"hybrid_override_pattern": "M-*M-", "num_hidden_layers": 5},
        "bamba": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        "falcon_h1": {"layers_block_type": ["hybrid"] * 2},
    }
    for name, keys in more.items():
        original = oracle.checkpoint(name)
        assert_loads_alike(copied(original, tmp_path / name, config=lambda c, new=keys: c.update(new)), original)


def drop(tensors: dict[str, Any]) -> None:
    del tensors["backbone.layers.1.mixer.A_log"]


def add_seven(tensors: dict[str, Any]) -> None:
    tensors.update({f"extra.{n}": torch.ones(1) for n in range(7)})


def misshape(tensors: dict[str, Any]) -> None:
    tensors["backbone.norm_f.weight"] = torch.ones(65)


def quantize(tensors: dict[str, Any]) -> None:
    name = "backbone.layers.0.mixer.in_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, r"missing tensors: backbone\.layers\.1\.mixer\.A_log"),
        (add_seven, r"surplus tensors: extra\.0, extra\.1, extra\.2, extra\.3, extra\.4 and 2 more"),
        (misshape, r"wrong shapes: backbone\.norm_f\.weight \[65\], expected \[64\]"),
        (quantize, r"unsupported dtypes: backbone\.layers\.0\.mixer\.in_proj\.weight \(F8_E4M3\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(oracle: Oracle, tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(copied(oracle.checkpoint("mamba2"), tmp_path / "copy", tensors=change))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_named(
    oracle: Oracle, tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors["backbone.layers.1.mixer.out_proj.weight"][3, 5] = value

    path = copied(oracle.checkpoint("mamba2"), tmp_path / "copy", tensors=spoil)
    with pytest.raises(ModelError, match=r"backbone\.layers\.1\.mixer\.out_proj\.weight holds NaN or infinity"):
        load(path, dtype)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/model.safetensors", "in/../../model.safetensors"])
def test_an_index_points_into_its_folder(oracle: Oracle, tmp_path: Path, name: str) -> None:
    path = shutil.copytree(oracle.checkpoint("mamba2"), tmp_path / "copy")
    shutil.copytree(path, tmp_path / "other")
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"backbone.norm_f.weight": name}}))
    with pytest.raises(ModelError, match="points outside its folder"):
        load(path)


def test_untied_head_is_required(oracle: Oracle, tmp_path: Path) -> None:
    path = copied(oracle.checkpoint("mamba2"), tmp_path / "copy", config=lambda c: c.update(tie_word_embeddings=False))
    with pytest.raises(ModelError, match=r"missing tensors: lm_head\.weight"):
        load(path)


def test_errors_for_folders_without_a_checkpoint_say_what_to_do(
    oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"name/part is not a folder .* not a name on the hub such as ORG/NAME"):
        load(Path("org/name/part"))
    with pytest.raises(ModelError, match="nowhere is not a folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="should hold an object"):
        load(tmp_path)
    shutil.copy(oracle.checkpoint("mamba2") / "config.json", tmp_path / "config.json")
    with pytest.raises(ModelError, match="holds no safetensors"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        load(tmp_path)


def test_missing_shards_and_a_useless_index_are_named(oracle: Oracle, tmp_path: Path) -> None:
    path = copied(oracle.checkpoint("mamba2", max_shard_size="40KB"), tmp_path / "copy")
    gone = sorted(path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=f"lacks the shards {gone.name}"):
        load(path)
    (path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="no usable weight_map"):
        load(path)
