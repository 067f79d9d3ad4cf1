"""Multimodal checkpoints: which give their text model, and whether an export is the whole checkpoint again."""

import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as MULTIMODAL,
)

from posttrain.config import Architecture, ModelConf
from posttrain.errors import UserError
from posttrain.models.loading import load_checkpoint
from posttrain.models.shrink import shrunk
from posttrain.models.stored import stored
from posttrain.models.tiny import tiny_tokenizer
from posttrain.training.export import write

TEXT = sorted(MULTIMODAL)
# Of all the types these load their text model, which is exported back into the whole checkpoint.
LOADED = """
aria aya_vision cohere2_vision deepseek_vl deepseek_vl_hybrid exaone4_5 fuyu gemma3 glm46v glm4v glm4v_moe glm5_next
glm_ocr got_ocr2 hyperclovax_vision_v2 idefics3 internvl janus lfm2_vl lfm3_vl lighton_ocr llama4 llava llava_next
llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 nemotron_h_omni ovis2 paligemma
pp_chart2table qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm video_llama_3 video_llava vipllava
""".split()
# Their default configs contradict themselves; this is what the published checkpoints say.
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
OTHER_LOGITS = ["kimi_k25", "muse_glimmer"]
NO_TEXT_MODEL = ["mllama", "paddleocr_vl"]
IDS = torch.arange(1, 20)[None]


def whole(model_type):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = CONFIG_MAPPING[model_type]()
        if model_type.startswith("glm4"):
            config.text_config.rope_parameters, config.text_config.head_dim = SECTIONS, 128
        config = shrunk(config)
        torch.manual_seed(0)
        return getattr(transformers, MULTIMODAL[model_type])(config).float().eval()


def saved(model, path):
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return ModelConf(architecture=Architecture.auto, path=str(path))


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("model_type", LOADED)
def test_the_text_model_is_loaded_trained_and_exported_within_the_whole(model_type, tmp_path):
    original = whole(model_type)
    cfg = saved(original, tmp_path / "source")
    loaded = load_checkpoint(cfg)
    torch.testing.assert_close(logits(loaded.model), logits(original), rtol=0, atol=1e-5)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    write(loaded.model, loaded.model.state_dict(), loaded.tokenizer, tmp_path / "export", cfg)
    before, after = stored(cfg.path, None), stored(str(tmp_path / "export"), None)
    assert after.shapes == before.shapes
    again, info = type(original).from_pretrained(tmp_path / "export", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    trained = logits(loaded.model)
    assert (trained - logits(original)).abs().max() > 1e-3
    torch.testing.assert_close(logits(again.eval()), trained, rtol=0, atol=1e-5)
    # And this project reads it again, too.
    reread = load_checkpoint(ModelConf(architecture=Architecture.auto, path=str(tmp_path / "export")))
    torch.testing.assert_close(logits(reread.model), trained, rtol=0, atol=1e-5)


def test_experts_in_the_layout_of_the_hub(tmp_path):
    """Published Qwen3-VL-MoE files hold the experts' matrices the other way round."""
    original = whole("qwen3_vl_moe")
    cfg = saved(original, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    turned = [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    weights |= {name: weights[name].transpose(1, 2).contiguous() for name in turned}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert turned
    torch.testing.assert_close(logits(load_checkpoint(cfg).model), logits(original), rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", OTHER_LOGITS)
def test_a_text_model_that_writes_other_logits_by_itself_is_refused(model_type, tmp_path):
    cfg = saved(whole(model_type), tmp_path)
    with pytest.raises(UserError, match="writes other logits than within it") as error:
        load_checkpoint(cfg)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model_type", NO_TEXT_MODEL)
def test_a_text_part_without_a_text_model_is_refused(model_type, tmp_path):
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"multimodal '{model_type}' checkpoint.*no text model of its text part") as e:
        load_checkpoint(ModelConf(architecture=Architecture.auto, path=str(tmp_path)))
    assert "\n" not in str(e.value)


def test_enough_of_the_types_load():
    assert len(LOADED) >= 40 and not {*LOADED} & {*OTHER_LOGITS, *NO_TEXT_MODEL} and {*LOADED} <= {*TEXT}


def test_the_other_parts_are_named_and_copied_unchanged(tmp_path):
    original = whole("llava")
    cfg = saved(original, tmp_path / "source")
    loaded = load_checkpoint(cfg)
    (note,) = loaded.notes
    assert note.startswith("left out of the checkpoint:") and "vision_tower" in note
    write(loaded.model, loaded.model.state_dict(), loaded.tokenizer, tmp_path / "export", cfg)
    again = type(original).from_pretrained(tmp_path / "export", dtype=torch.float32)
    vision = {name: value for name, value in original.state_dict().items() if "vision_tower" in name}
    assert vision and all(torch.equal(again.state_dict()[name], value) for name, value in vision.items())
    assert AutoConfig.from_pretrained(tmp_path / "export").model_type == "llava"
