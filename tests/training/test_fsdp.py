"""The plugin that shards: in which dtypes parameters are computed with, reduced and returned."""

import pytest
import torch

from posttrain.config import Architecture, FSDPConf, ModelConf, OptimConf, Strategy
from posttrain.models.loading import load
from posttrain.training.fsdp import gathered, make_accelerator
from posttrain.training.optim import make_optimizer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_reduced_and_outputs_returned_in_fp32(one_rank, dtype):
    """In bf16 they would cost 7e-3 of the loss: too little to show in a loss on one rank."""
    model, _ = load(ModelConf(architecture=Architecture.qwen3_dense))
    accelerator = make_accelerator(FSDPConf(strategy=Strategy.full_shard), model, dtype)
    mixed = accelerator.state.fsdp_plugin.mixed_precision_policy
    assert (mixed.param_dtype, mixed.reduce_dtype, mixed.output_dtype) == (dtype, torch.float32, torch.float32)
    model, _ = accelerator.prepare(model, make_optimizer(model, OptimConf()))
    ids = torch.arange(5)[None]
    assert model(input_ids=ids).logits.dtype is torch.float32


def test_what_is_no_model_of_transformers_cannot_generate():
    with pytest.raises(TypeError, match="a Linear is no model of transformers"), gathered(torch.nn.Linear(2, 2)):
        pass
