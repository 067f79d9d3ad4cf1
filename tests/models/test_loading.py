"""From a path to a model: what is accepted, what is refused and in which words."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    OPTConfig,
    OPTForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5VisionConfig,
)

from posttrain.config import Architecture, Dtype, ModelConf, RolloutConf
from posttrain.errors import UserError
from posttrain.models import loading
from posttrain.models.configs import load_config
from posttrain.models.loading import compute_dtype, end_token_ids, load
from posttrain.models.tiny import EMBEDDED, tiny_config, tiny_tokenizer
from posttrain.records import Problem
from posttrain.rollout.local import generate


def at(path, architecture=Architecture.auto, **options):
    return ModelConf(architecture=architecture, path=str(path), **options)


def test_a_multimodal_checkpoint_gives_its_text_model(tmp_path):
    """As the published Qwen3.5 weights are: vision tower and text model in one file."""
    vision = Qwen3_5VisionConfig(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=96)
    config = Qwen3_5Config(text_config=tiny_config("qwen3_5_dense").to_dict(), vision_config=vision.to_dict())
    torch.manual_seed(0)
    whole = Qwen3_5ForConditionalGeneration(config).float().eval()
    whole.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model, _ = load(at(tmp_path, Architecture.qwen3_5_dense))
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        wanted, found = whole(input_ids=ids).logits, model(input_ids=ids).logits
    assert type(model).__name__ == "Qwen3_5ForCausalLM" and torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_dropout_of_any_kind(tmp_path, checkpointing):
    """OPT calls F.dropout in the very layers that gradient checkpointing keeps in train mode."""
    config = OPTConfig(
        vocab_size=264, hidden_size=32, word_embed_proj_dim=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
        dropout=0.5, attention_dropout=0.5, layerdrop=0.5,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model, _ = load(dataclasses.replace(at(tmp_path), gradient_checkpointing=checkpointing))
    problems = [(0, Problem(task="", index=0, prompt="", prompt_ids=(5, 6), answer=""))]
    generate(model, problems, RolloutConf(max_new_tokens=2), key=(0, 0, 0), end_ids=[256], pad_id=257)
    ids, calls = torch.arange(1, 20)[None], []
    layer = model.model.decoder.layers[0]
    layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    first, second = (model(ids, use_cache=False).logits for _ in range(2))
    assert torch.equal(first, second)
    first.sum().backward()
    assert len(calls) == (3 if checkpointing else 2)  # recomputed


def test_dropout_that_would_come_from_the_config_is_refused(tmp_path):
    config = FalconConfig(
        vocab_size=264, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, hidden_dropout=0.1
    )
    FalconForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    ids = torch.arange(1, 20)[None]
    model, _ = load(at(tmp_path))
    assert torch.equal(model(ids).logits, model(ids).logits)
    with pytest.raises(UserError, match="hidden_dropout=0.1 in FalconDecoderLayer.*gradient_checkpointing=false"):
        load(at(tmp_path, gradient_checkpointing=True))


def test_masters_are_fp32_and_every_end_token_counts(tmp_path):
    config = GPT2Config(vocab_size=264, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)
    model = GPT2LMHeadModel(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = [3, 4]
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model, tokenizer = load(at(tmp_path))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert end_token_ids(model, tokenizer) == {256, 3, 4}
    ids = torch.arange(1, 20)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_compute_dtype_follows_the_device_unless_told():
    assert compute_dtype(at("x")) is (torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    assert compute_dtype(at("x", dtype=Dtype.bf16)) is torch.bfloat16


@pytest.mark.parametrize(
    "path, message",
    [
        ("./nowhere", "neither a directory nor a hub name"),
        ("a/b/c", "neither a directory nor a hub name"),
        ("gpt2-that-is-not-here", "could not be loaded.*Is the hub reachable"),
        ("nobody/nothing", "could not be loaded.*Is the hub reachable"),
    ],
)
def test_paths_that_lead_nowhere(monkeypatch, path, message):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=message) as error:
        load_config(at(path))
    assert "\n" not in str(error.value)


def test_code_beside_the_weights_does_not_run(tmp_path):
    """A model directory with its own Python: refused unless model.trust_remote_code says otherwise."""
    canary = tmp_path / "canary"
    code = (
        f"open({str(canary)!r}, 'w')\nfrom transformers import PreTrainedConfig\nclass C(PreTrainedConfig):\n    pass\n"
    )
    (tmp_path / "code.py").write_text(code)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "code.C"}}))
    with pytest.raises(UserError, match="trust_remote_code"):
        load(ModelConf(architecture=Architecture.auto, path=str(tmp_path)))
    assert not canary.exists()


def test_weights_that_are_missing_are_not_made_up(tmp_path):
    shutil.copytree(EMBEDDED / "qwen3_dense", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="lacks 1 weights of the model, such as model.layers.1.mlp.up_proj.weight"):
        load(ModelConf(architecture=Architecture.qwen3_dense, path=str(tmp_path / "model")))


def test_attention_auto_takes_flash_attention_where_it_can_run(monkeypatch):
    qwen, gpt_oss = tiny_config("qwen3_5_dense"), GptOssConfig()
    auto = ModelConf(dtype=Dtype.bf16)
    assert loading.attention(auto, qwen) is None  # transformers' own choice
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(loading, "is_flash_attn_2_available", lambda: True)
    assert loading.attention(auto, qwen) == loading.attention(auto, gpt_oss) == "flash_attention_2"
    assert loading.attention(auto, BloomConfig()) is None
    assert loading.attention(ModelConf(dtype=Dtype.fp32), qwen) is None
    assert loading.attention(ModelConf(attention="sdpa"), qwen) == "sdpa"


@pytest.mark.parametrize(
    "name, words", [("flex_attention", "model.attention=sdpa"), ("sdpaa", "Type one of: auto, eager")]
)
def test_attention_that_cannot_run_is_refused(name, words):
    with pytest.raises(UserError, match=f"model.attention={name}.*{words}"):
        load(ModelConf(architecture=Architecture.qwen3_dense, attention=name))
