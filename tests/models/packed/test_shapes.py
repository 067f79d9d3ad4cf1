"""Shapes that default configs leave off: packed right, each against its documents alone, on the real layer classes."""

import pytest
import torch

from posttrain.models import gdn_packing
from posttrain.models.architectures import tiny
from posttrain.models.survey.shapes import SHAPES

IDS = torch.arange(1, 41)[None]


@pytest.mark.parametrize("name", ["phimoe+window", "zamba2+adapters", "cohere+qk_norm", "llama+yarn", "qwen2+window"])
def test_what_is_on_is_in_the_tiny_model_and_packs(name):
    model_type, fields = SHAPES[name]
    model, plain = tiny(model_type, **fields), tiny(model_type)
    with torch.no_grad():
        assert not torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    gdn_packing.patch(model, torch.device("cpu"), packed=True)
    assert gdn_packing.verify(model, longest=0).max_difference < 1e-5


def test_a_window_that_only_the_mask_knows():
    """PhiMoE tells its attention nothing of it: each token sees no more than the last eight."""
    model = tiny("phimoe", sliding_window=8)
    gdn_packing.patch(model, torch.device("cpu"), packed=True)
    boundaries = gdn_packing.boundaries([40], torch.device("cpu"))
    far = IDS.clone()
    far[0, 0] = 50
    with torch.no_grad():
        first, other = (model(input_ids=ids, **boundaries).logits[0] for ids in (IDS, far))
    # Two layers see as far as twice the window, less the token itself.
    reach = (first - other).abs().amax(-1) > 1e-6
    assert reach[:8].all() and not reach[15:].any()
