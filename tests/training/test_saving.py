"""Checkpoints are written beside the training, close when every rank has signed, and go when no option keeps them."""

import os
import re
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.config import CheckpointConf
from posttrain.models.tiny import tiny_config
from posttrain.training import checkpoint, manifest, saving, snapshot
from posttrain.training.optim import OptimConf, make_optimizer
from posttrain.training.saving import Saver
from posttrain.training.snapshot import Snapshot, generator_states, set_generator_states


@pytest.fixture
def trained(one_rank):
    """A small model and its optimizer, after a step in which one parameter had no gradient."""
    torch.manual_seed(0)
    config = tiny_config("qwen3_dense")
    config.num_hidden_layers, config.hidden_size = 1, 32
    model = AutoModelForCausalLM.from_config(config).float()
    optimizer = make_optimizer(model, OptimConf(lr=0.1))
    model.model.norm.requires_grad_(False)
    model(torch.arange(9)[None]).logits.square().mean().backward()
    model.model.norm.requires_grad_(True)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save(run_dir, trained, step, reward=None, **options):
    saver = Saver(run_dir, CheckpointConf(**options), "eval/reward", 10)
    evaluation = {} if reward is None else {"eval/reward": reward, "eval/other": -step}
    saver.save(*trained, None, step, generator_states(), evaluation, {"problems": "12"})
    return saver


def state(model, optimizer):
    states = [optimizer.state.get(parameter, {}) for parameter in model.parameters()]
    held = [*model.parameters(), *(state[name] for state in states for name in sorted(state))]
    return [tensor.detach().clone() for tensor in held]


def test_what_is_restored_is_what_was_saved_though_training_went_on(tmp_path, trained, monkeypatch):
    """The copy is taken at once, and written later: training changes the weights in between."""
    model, optimizer = trained
    before, write = state(*trained), Snapshot.write
    monkeypatch.setattr(Snapshot, "write", lambda *arguments: (time.sleep(0.5), write(*arguments)))
    saver = save(tmp_path, trained, 3)
    assert checkpoint.complete(tmp_path) == []
    model(torch.arange(5)[None]).logits.square().mean().backward()
    optimizer.step()
    saver.wait()
    (folder,) = checkpoint.complete(tmp_path)
    assert not all(map(torch.equal, before, state(*trained)))
    found, notes = checkpoint.load(model, optimizer, folder)
    assert (found.step, found.fingerprints, notes) == (3, {"problems": "12"}, [])
    assert len(before) > 20 and all(map(torch.equal, before, state(*trained)))
    assert model.model.norm.weight not in optimizer.state


def test_the_step_after_a_resume_is_the_one_without(tmp_path, trained):
    model, optimizer = trained
    save(tmp_path, trained, 1).wait()

    def step():
        model(torch.arange(9)[None]).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return state(*trained)

    expected = step()
    checkpoint.load(model, optimizer, *checkpoint.complete(tmp_path))
    assert all(map(torch.equal, expected, step()))


def test_generators_go_on_where_they_were():
    import random

    import numpy as np

    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item(), np.random.randn()

    draw()
    held = generator_states()
    first = draw()
    assert draw() != first
    set_generator_states(held)
    assert draw() == first


@pytest.mark.parametrize(
    "options, kept",
    [
        ({"keep_last": 2}, [5, 6]),
        ({"keep_last": 0}, [1, 2, 3, 4, 5, 6]),
        ({"keep_last": 1, "keep_every": 2}, [2, 4, 6]),
        ({"keep_last": 1, "best": True}, [3, 6]),
        ({"keep_last": 1, "best": "eval/other"}, [1, 6]),
    ],
)
def test_which_are_kept(tmp_path, trained, options, kept):
    for step, reward in enumerate([0.1, 0.5, 0.7, 0.7 - 1e-9, 0.2, None], 1):
        save(tmp_path, trained, step, reward, **options).wait()
    assert [manifest.read(path).step for path in checkpoint.complete(tmp_path)] == kept
    assert {path.name[:5] for path in (tmp_path / "checkpoints").iterdir()} == {"step_"}


def test_no_checkpoint_goes_for_one_that_could_not_be_written(tmp_path, trained, monkeypatch):
    save(tmp_path, trained, 1, keep_last=1).wait()

    def full(file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "flush_to_disk", full)
        saver = save(tmp_path, trained, 2, keep_last=1)
        with pytest.raises(OSError, match="No space left"):
            saver.wait()
    saver.give_up()
    (left,) = checkpoint.complete(tmp_path)
    assert left.name == "step_00000001" and checkpoint.damage(left) is None
    save(tmp_path, trained, 2, keep_last=1).wait()
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["step_00000002"]


def flip_last_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, 9000), flip_last_byte])
def test_a_disk_that_gives_back_other_bytes_than_it_was_given(tmp_path, trained, monkeypatch, damage):
    write = Snapshot.write

    def damaged(taken: Snapshot, tensors: Path, generators: Path) -> None:
        write(taken, tensors, generators)
        damage(tensors)

    monkeypatch.setattr(Snapshot, "write", damaged)
    with pytest.raises(OSError, match=r"rank_00000\.safetensors reads otherwise than it was written"):
        save(tmp_path, trained, 1).wait()
    assert checkpoint.complete(tmp_path) == []


def test_a_rank_that_never_signs_is_waited_for_within_bounds(tmp_path, one_rank):
    saver = Saver(tmp_path, CheckpointConf(), "eval/reward", timeout_s=0.3)
    (tmp_path / "rank_00000.signed").write_text("{}")
    with pytest.raises(TimeoutError, match=r"1 of 2 ranks wrote their share in 0\.3 s"):
        saver._others(tmp_path, 2)


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path, trained):
    save(tmp_path, trained, 1).wait()
    names = sorted(path.name for path in checkpoint.complete(tmp_path)[0].iterdir())
    assert names == ["manifest.json", "rank_00000.json", "rank_00000.safetensors"]
    for module in (checkpoint, manifest, saving, snapshot):
        assert not re.search(r"torch\.load|pickle\.\w|import pickle", Path(module.__file__).read_text())
