"""The marks that travel with a model call: made once, and refused where they are not of the row."""

import pytest
import torch
from packed_models import built, tokens

from posttrain.models.gdn_packing import boundaries
from posttrain.models.packed.boundaries import documents


def test_boundaries_by_hand():
    made = boundaries([1, 3, 2], "cpu")
    assert made["position_ids"].tolist() == [[0, 0, 1, 2, 0, 1]] and made["position_ids"].dtype == torch.int64
    assert made["seq_idx"].tolist() == [[0, 1, 1, 1, 2, 2]] and made["seq_idx"].dtype == torch.int32
    assert made["cu_seq_lens_q"].tolist() == made["cu_seq_lens_k"].tolist() == [0, 1, 4, 6]
    assert made["cu_seq_lens_q"].dtype == torch.int32
    assert made["max_length_q"] == made["max_length_k"] == 3
    assert made["document_lengths"] == (1, 3, 2) and made["use_cache"] is False


@pytest.mark.parametrize("lengths", [[], [0], [3, 0, 2], [3, -1]])
def test_boundaries_refuse_empty_documents(lengths):
    with pytest.raises(ValueError, match="at least one token"):
        boundaries(lengths, "cpu")


def test_boundaries_take_whole_numbers_only():
    with pytest.raises(TypeError):
        boundaries([1.5], "cpu")


def test_boundaries_that_do_not_fill_the_row_are_refused():
    for lengths in [(5, 4), (5, 6)]:
        kwargs = boundaries(lengths, "cpu")
        kwargs["position_ids"] = torch.arange(10)[None]
        with pytest.raises(ValueError, match="must fill one row"):
            built("qwen3_5")(input_ids=tokens(10)[None], **kwargs)
    with pytest.raises(ValueError, match="use_cache=False"):
        built("qwen3_5")(input_ids=tokens(10)[None], **boundaries([4, 6], "cpu") | {"use_cache": True})
    assert documents({"document_lengths": (10,)}, 1, 10) is None
    with pytest.raises(ValueError, match="must fill one row"):
        documents({"document_lengths": (4, 5)}, 1, 10)
    with pytest.raises(ValueError, match="start at 0"):
        documents({"cu_seqlens": torch.tensor([2, 10])}, 1, 10)
    with pytest.raises(ValueError, match="2 document_lengths"):
        documents({"cu_seqlens": torch.tensor([0, 10]), "document_lengths": (4, 6)}, 1, 10)
