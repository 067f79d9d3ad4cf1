"""Multimodal checkpoints: which give their text model, and whether an export is the whole checkpoint again."""

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForMultimodalLM, Gemma3nForCausalLM

from posttrain.config import Architecture, ModelConf
from posttrain.errors import UserError
from posttrain.models.loading import load_checkpoint
from posttrain.models.shrink import shrunk
from posttrain.models.stored import stored, text_names
from posttrain.models.tiny import tiny_tokenizer
from posttrain.training.export import write

# These load their text model, which is exported back into the whole checkpoint.
LOADED = """
aria cosmos3_edge cosmos3_omni deepseek_vl deepseek_vl_hybrid ernie4_5_vl_moe exaone4_5 fuyu gemma3 gemma4
gemma4_unified glm46v glm4v glm4v_moe glm5_next glm_ocr glmga got_ocr2 granite4_vision granite_speech
hyperclovax_vision_v2 idefics2 idefics3 internvl janus kimi_k25 lfm2_vl lfm3_vl lighton_ocr llama4 llava llava_next
llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 mllama nemotron_h_omni ovis2 paddleocr_vl
paligemma pp_chart2table qianfan_ocr qwen2_5_omni_thinker qwen2_5_vl qwen2_audio qwen2_vl qwen3_5 qwen3_5_moe qwen3_asr
qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe smolvlm video_llama_3 video_llava vipllava voxtral
""".split()
REFUSED = {
    "aya_vision": r"writes other logits.*leaves out logit_scale=0.0625: write 1.0 in the text_config",
    "cohere2_vision": r"writes other logits.*leaves out logit_scale=0.0625: write 1.0 in the text_config",
    "mistral_large4": "writes other logits.*Train a checkpoint of the text model alone",
    "muse_glimmer": "writes other logits.*Train a checkpoint of the text model alone",
    "blip": "no causal model of its text part.*Take a checkpoint of a text model",
    "kosmos-2": "no causal model of its text part.*Take a checkpoint of a text model",
    "t5gemma2": "no causal model of its text part.*Take a checkpoint of a text model",
    "pp_formulanet": "no small 'pp_formulanet' model can be tried.*Train a checkpoint of the text model alone",
    "voxtral_realtime": "no small 'voxtral_realtime' model can be tried.*Train a checkpoint of the text model alone",
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
# What a default config lacks, which checkpoints have.
FIELDS = {
    "gemma4": {"vision_config": {}},
    "gemma4_unified": {"vision_config": {}},
    "glm46v": {"text_config": {"rope_parameters": MROPE}},
    "glm4v": {"text_config": {"rope_parameters": MROPE}},
    "glm4v_moe": {"text_config": {"rope_parameters": MROPE, "head_dim": 128}},
    "glmga": {"text_config": {"rope_parameters": MROPE}},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]], "spatial_target_layers": [0, 1], "downsample_rate": "1/2",
        "image_grid_pinpoints": [[32, 32]],
    },
    "janus": {"vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1}},
}  # fmt: skip
# None of these is a special token.
IDS = torch.arange(2, 21)[None]


def small(model_type, **fields):
    """A small config; the tokens that stand for pictures and padding are 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = shrunk(CONFIG_MAPPING[model_type](**FIELDS.get(model_type, {}), **fields))
    for part in (config, config.get_text_config(decoder=True)):
        for name in [name for name in vars(part) if name.endswith("token_id") and getattr(part, name) is None]:
            setattr(part, name, 0)
    if model_type == "idefics2":
        # A config that is read again takes these from the text model.
        config.perceiver_config.hidden_size = config.text_config.hidden_size
        config.perceiver_config.rms_norm_eps = config.text_config.rms_norm_eps
    return config


def whole(model_type, **fields):
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(small(model_type, **fields)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Weights that begin as zeros or ones would hide a mistake.
            parameter += 0.01 * torch.randn_like(parameter)
    return model


def saved(model, path):
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return at(path)


def at(path):
    return ModelConf(architecture=Architecture.auto, path=str(path))


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


def trained(model):
    """A step of gradient descent."""
    loss = torch.nn.functional.cross_entropy(model(input_ids=IDS, use_cache=False).logits[0, :-1], IDS[0, 1:])
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    return model


def exported(loaded, cfg, path):
    """The export of a loaded text model, and the multimodal class with its weights."""
    write(loaded.model, loaded.model.state_dict(), loaded.tokenizer, path, cfg)
    again, info = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return again.eval()


@pytest.mark.parametrize("model_type", LOADED)
def test_the_text_model_is_loaded_trained_and_exported_within_the_whole(model_type, tmp_path):
    original = whole(model_type)
    cfg = saved(original, tmp_path / "source")
    loaded = load_checkpoint(cfg)
    torch.testing.assert_close(logits(loaded.model), logits(original), rtol=0, atol=1e-5)
    assert (logits(trained(loaded.model)) - logits(original)).abs().max() > 1e-3
    again = exported(loaded, cfg, tmp_path / "export")
    assert stored(str(tmp_path / "export"), None).shapes == stored(cfg.path, None).shapes
    torch.testing.assert_close(logits(again), logits(loaded.model), rtol=0, atol=1e-5)
    before, after = original.state_dict(), again.state_dict()
    text = {tensor.data_ptr() for tensor in original.get_decoder().state_dict().values()}
    other = [n for n in before if before[n].data_ptr() not in text and not n.endswith("lm_head.weight")]
    assert other and all(torch.equal(before[name], after[name]) for name in other)
    # And this project reads it again, too.
    reread = load_checkpoint(at(tmp_path / "export"))
    torch.testing.assert_close(logits(reread.model), logits(loaded.model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_right_is_refused_in_one_line_that_says_what_to_do(model_type, tmp_path):
    small(model_type).save_pretrained(tmp_path)
    save_file({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=REFUSED[model_type]) as error:
        load_checkpoint(at(tmp_path))
    assert "\n" not in str(error.value) and repr(model_type) in str(error.value)


def test_a_scale_that_the_whole_leaves_out_is_1_in_its_config(tmp_path):
    original = whole("aya_vision")
    original.config.text_config.logit_scale = 1.0
    loaded = load_checkpoint(saved(original, tmp_path))
    torch.testing.assert_close(logits(loaded.model), logits(original), rtol=0, atol=1e-5)


def test_the_other_parts_and_their_files_are_named_and_copied_unchanged(tmp_path):
    original = whole("llava")
    cfg = saved(original, tmp_path / "source")
    (tmp_path / "source" / "preprocessor_config.json").write_text('{"size": 32}')
    loaded = load_checkpoint(cfg)
    (note,) = loaded.notes
    assert note.startswith("left out of the checkpoint:") and "vision_tower" in note
    again = exported(loaded, cfg, tmp_path / "export")
    vision = {name: value for name, value in original.state_dict().items() if "vision_tower" in name}
    assert vision and all(torch.equal(again.state_dict()[name], value) for name, value in vision.items())
    assert AutoConfig.from_pretrained(tmp_path / "export").model_type == "llava"
    assert (tmp_path / "export" / "preprocessor_config.json").read_text() == '{"size": 32}'


@pytest.mark.parametrize("twice", [False, True])
def test_a_head_that_only_the_whole_config_ties_is_tied_and_written_once(twice, tmp_path):
    original = whole("qwen2_vl", tie_word_embeddings=True)
    assert original.lm_head.weight is original.get_input_embeddings().weight
    cfg = saved(original, tmp_path / "source")
    if twice:
        weights = load_file(tmp_path / "source" / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    loaded = load_checkpoint(cfg)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    trained(loaded.model)
    again = exported(loaded, cfg, tmp_path / "export")
    assert "lm_head.weight" not in stored(str(tmp_path / "export"), None).shapes
    torch.testing.assert_close(logits(again), logits(loaded.model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_vl_moe", "llava"])
def test_a_file_with_the_names_of_the_modules_is_read_and_written_so(model_type, tmp_path):
    """Checkpoints of before and after transformers 4.52 have other names; files have either."""
    original = whole(model_type)
    cfg = saved(original, tmp_path / "source")
    weights = {name: value.clone() for name, value in original.state_dict().items()}
    save_file(weights, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    loaded = load_checkpoint(cfg)
    torch.testing.assert_close(logits(loaded.model), logits(original), rtol=0, atol=1e-5)
    trained(loaded.model)
    again = exported(loaded, cfg, tmp_path / "export")
    assert stored(str(tmp_path / "export"), None).shapes.keys() == weights.keys()
    torch.testing.assert_close(logits(again), logits(loaded.model), rtol=0, atol=1e-5)


def test_a_whole_that_a_missing_package_hides_gives_its_text_model_all_the_same(tmp_path):
    """The vision tower of Gemma 3n needs timm."""
    config = small("gemma3n")
    torch.manual_seed(0)
    original = Gemma3nForCausalLM(config.text_config).eval()
    weights = {name.replace("model.", "model.language_model.", 1): w for name, w in original.state_dict().items()}
    weights.pop("lm_head.weight")
    weights["model.vision_tower.timm_model.conv.weight"] = torch.ones(3)
    config.save_pretrained(tmp_path / "source")
    save_file(weights, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    loaded = load_checkpoint(at(tmp_path / "source"))
    assert torch.equal(logits(loaded.model), logits(original))
    trained(loaded.model)
    write(loaded.model, loaded.model.state_dict(), loaded.tokenizer, tmp_path / "export", at(tmp_path / "source"))
    assert stored(str(tmp_path / "export"), None).shapes == stored(str(tmp_path / "source"), None).shapes
    reread = load_checkpoint(at(tmp_path / "export"))
    assert torch.equal(logits(reread.model), logits(loaded.model))


def test_of_an_omni_model_the_thinker_is_trained(tmp_path):
    original = whole("qwen2_5_omni", enable_audio_output=False)
    cfg = saved(original, tmp_path / "source")
    torch.save({}, tmp_path / "source" / "spk_dict.pt")  # of the talker's voices
    # A talker has layers as well.
    weights = load_file(tmp_path / "source" / "model.safetensors")
    talker = {
        name.replace("thinker.", "talker."): torch.zeros_like(value)
        for name, value in weights.items()
        if name.startswith("thinker.model.")
    }
    save_file(weights | talker, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    loaded = load_checkpoint(cfg)
    torch.testing.assert_close(logits(loaded.model), logits(original.thinker), rtol=0, atol=1e-5)
    trained(loaded.model)
    write(loaded.model, loaded.model.state_dict(), loaded.tokenizer, tmp_path / "export", cfg)
    again = type(original).from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    torch.testing.assert_close(logits(again.thinker), logits(loaded.model), rtol=0, atol=1e-5)


def test_a_file_with_two_text_models_is_refused(tmp_path):
    original = whole("llava")
    cfg = saved(original, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    twice = {f"draft.{name}": value.clone() for name, value in weights.items() if name.startswith("language_model.")}
    save_file(weights | twice, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"its weights may be .*language_model.* as well as") as error:
        load_checkpoint(cfg)
    assert "\n" not in str(error.value)


def test_the_page_on_inputs_names_the_same_types():
    page = (Path(__file__).parents[2] / "docs" / "inputs.md").read_text(encoding="utf-8")
    section = page.partition("### Multimodal checkpoints")[2].partition("\n### ")[0]
    paragraph = section.partition("in the tests:\n")[2].partition("\n\n")[0]
    assert paragraph.rstrip(".").replace("\n", " ").split(", ") == LOADED
    table = [row.split("|")[1].strip() for row in section.splitlines() if row.startswith("| ")]
    assert ", ".join(table[1:]).split(", ") == list(REFUSED)


def test_parts_of_the_text_model_may_have_other_names_than_its_prefix_gives():
    wanted = {"model.embed.weight": (9, 4), "model.layers.0.up.weight": (4, 4), "model.norm.weight": (4,)}
    vision = {"tower.blocks.0.up.weight": (4, 4), "tower.norm.weight": (4,)}
    blocks = {"text.embed.weight": (9, 4), "text.blocks.0.up.weight": (4, 4), "text.norm.weight": (4,)}
    found = text_names(vision | blocks, wanted, "model")
    assert list(found.items()) == [(r"^text\.", "model."), (r"^model\.blocks\.", "model.layers.")]
    deeper = {"text.embed.weight": (9, 4), "text.norm.weight": (4,), "tower.norm.weight": (4,)}
    deeper |= {f"text.encoder.layers.0.{name}.weight": (4, 4) for name in ("up", "down", "gate")}
    wanted |= {f"model.layers.0.{name}.weight": (4, 4) for name in ("down", "gate")}
    found = text_names(deeper, wanted, "model")
    assert found == {
        r"^text\.encoder\.": "model.", r"^text\.embed\.": "model.embed.", r"^text\.norm\.": "model.norm."
    }  # fmt: skip
