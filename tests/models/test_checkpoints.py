"""Checkpoints as users bring them: extra, missing and tied weights, flags, torn files, and what an export holds."""

import json
import os
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, MixtralConfig, MixtralForCausalLM

from posttrain.config import Architecture, ModelConf
from posttrain.errors import UserError
from posttrain.models.loading import check_export, load, load_checkpoint
from posttrain.models.stored import header, stored
from posttrain.models.tiny import EMBEDDED, tiny_tokenizer
from posttrain.training.export import write

IDS = torch.arange(1, 20)[None]


@pytest.fixture
def copied(tmp_path):
    """The embedded qwen3 in a directory of its own, its weights, and how to write them back."""
    path = tmp_path / "model"
    shutil.copytree(EMBEDDED / "qwen3_dense", path)
    return path


def rewrite(path, change):
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def at(path):
    return ModelConf(architecture=Architecture.auto, path=str(path))


def edit(path, name, **fields):
    values = json.loads((path / name).read_text()) if (path / name).exists() else {}
    (path / name).write_text(json.dumps(values | fields))


def refused(path):
    with pytest.raises(UserError) as error:
        load_checkpoint(at(path))
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


def test_more_layers_in_the_file_than_in_the_config(copied):
    edit(copied, "config.json", num_hidden_layers=1, layer_types=None)
    assert "weights that its config.json has no place for, such as model.layers.1." in refused(copied)


def test_an_extra_bias(copied):
    rewrite(copied, lambda weights: weights.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    assert "holds 1 weights that its config.json has no place for" in refused(copied)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.layers.0.mlp.weight"])
def test_harmless_extras_are_left_out_and_named(copied, name):
    rewrite(copied, lambda weights: weights.update({name: torch.zeros(4)}))
    loaded = load_checkpoint(at(copied))
    # Some architectures say themselves what they leave out.
    assert all("left out of the checkpoint: 1 weights" in note for note in loaded.notes)
    plain, _ = load(ModelConf(architecture=Architecture.qwen3_dense))
    assert torch.equal(loaded.model(input_ids=IDS).logits, plain(input_ids=IDS).logits)


def test_another_shape(copied):
    rewrite(copied, lambda weights: weights.update({"model.norm.weight": torch.zeros(3)}))
    assert "model.norm.weight" in refused(copied)


def test_a_git_lfs_pointer(copied):
    (copied / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "is a Git LFS pointer" in refused(copied)


@pytest.mark.parametrize("kept", [4, 100, 0.5, -1])
def test_a_truncated_file(copied, kept):
    data = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(data[: int(len(data) * kept) if kept == 0.5 else kept])
    message = refused(copied)
    assert "truncated" in message or "no whole safetensors file" in message


def test_a_shard_that_is_missing(copied):
    names = sorted(header(copied / "model.safetensors"))
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    index["weight_map"][names[0]] = "model-00002-of-00002.safetensors"
    (copied / "model.safetensors").rename(copied / "model-00001-of-00002.safetensors")
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names model-00002-of-00002.safetensors, and it is not there" in refused(copied)


def test_no_tokenizer(copied):
    for file in copied.glob("*token*"):
        file.unlink()
    assert "has no tokenizer: copy tokenizer.json" in refused(copied)


def test_flags_of_the_config_are_switched_off_and_said(tmp_path):
    """output_router_logits kills the first decode, output_attentions the export."""
    shape = dict(
        vocab_size=264, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, pad_token_id=257, eos_token_id=256, bos_token_id=None,
    )  # fmt: skip
    MixtralForCausalLM(MixtralConfig(**shape)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    edit(tmp_path, "config.json", output_router_logits=True, output_attentions=True, output_hidden_states=True)
    loaded = load_checkpoint(at(tmp_path))
    assert [note.partition(" ")[0] for note in loaded.notes] == [
        "output_router_logits", "output_attentions", "output_hidden_states"
    ]  # fmt: skip
    write(loaded.model, loaded.model.state_dict(), loaded.tokenizer, tmp_path / "export", at(tmp_path))
    assert not json.loads((tmp_path / "export" / "config.json").read_text()).get("output_router_logits")


def test_a_generation_config_that_no_export_could_save(copied):
    model, tokenizer = load(at(copied))
    model.generation_config = GenerationConfig(do_sample=False, temperature=0.5, eos_token_id=[256, 7])
    with pytest.raises(ValueError, match="do_sample"):
        model.generation_config.save_pretrained(copied / "again")
    (note,) = check_export(model, tokenizer, str(copied))
    assert "only its token ids are kept" in note and model.generation_config.eos_token_id == [256, 7]
    model.generation_config.save_pretrained(copied / "again")


def test_tied_weights_are_exported_once(copied, tmp_path):
    model, tokenizer = load(at(copied))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    write(model, model.state_dict(), tokenizer, tmp_path / "export", at(copied))
    names = set(stored(str(tmp_path / "export"), None).shapes)
    assert names == set(stored(str(copied), None).shapes) - {"lm_head.weight"}
    again, _ = load(at(tmp_path / "export"))
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


CHANGES = st.lists(
    st.tuples(st.sampled_from(["drop", "extra", "shape", "prefix", "rename"]), st.integers(0, 20)), max_size=3
)


@settings(max_examples=40, deadline=None)
@given(CHANGES)
def test_a_generated_checkpoint_loads_the_same_or_is_refused_in_one_line(tmp_path_factory, changes):
    path = tmp_path_factory.mktemp("generated") / "model"
    shutil.copytree(EMBEDDED / "qwen3_dense", path)

    def change(weights):
        for kind, number in changes:
            names = sorted(weights)
            name = names[number % len(names)]
            if kind == "drop":
                del weights[name]
            elif kind == "extra":
                weights[f"{name}.more"] = torch.zeros(2)
            elif kind == "shape":
                weights[name] = weights[name].flatten()[:1].clone()
            elif kind == "prefix":
                for each in names:
                    weights[f"other.{each}"] = weights.pop(each)
            else:
                weights[name + "s"] = weights.pop(name)

    rewrite(path, change)
    plain, _ = load(ModelConf(architecture=Architecture.qwen3_dense))
    try:
        model, _ = load(at(path))
    except UserError as error:
        assert changes and "\n" not in str(error)
    else:
        assert torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    shutil.rmtree(path)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_is_not_waited_for(copied, name):
    (copied / name).unlink()
    os.mkfifo(copied / name)
    assert f"{name} is a pipe or a device, and no file: take it away" in refused(copied)
