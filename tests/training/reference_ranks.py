"""What test_reference.py asserts on real ranks.

For each strategy and dtype a policy is trained twice, without a reference and with one that is put in place again and
again. Two ranks leave checkpoints in a folder, from which one and four ranks resume.
"""

import copy
import os

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from posttrain.config import Architecture, CheckpointConf, FSDPConf, ModelConf, OptimConf, Strategy
from posttrain.config.algorithm import KLConf, ReferenceDevice
from posttrain.models.loading import load
from posttrain.training import checkpoint
from posttrain.training.fsdp import gathered, make_accelerator, sharding, synchronise_gradients
from posttrain.training.optim import make_optimizer
from posttrain.training.reference import make_reference
from posttrain.training.saving import Saver
from posttrain.training.snapshot import generator_states

STEPS = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KL = {device: KLConf(coefficient=0.1, reference=device) for device in ReferenceDevice}


def prepare(strategy, dtype):
    """A policy, its optimizer and their accelerator, as in a fresh process. shard_grad_op has frozen weights too."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    model, _ = load(ModelConf(architecture=Architecture.qwen3_dense))
    if strategy is Strategy.shard_grad_op:
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.requires_grad_(True)
        model.model.norm.requires_grad_(True)
    accelerator = make_accelerator(FSDPConf(strategy=strategy), model, dtype)
    model, optimizer = accelerator.prepare(model, make_optimizer(model, OptimConf(lr=3e-3, betas=[0.9, 0.999])))
    assert sharding(model) == strategy, sharding(model)
    assert isinstance(model, FSDPModule) == (strategy is not Strategy.no_shard)
    return accelerator, model, optimizer


def token_ids(step, n):
    """Of this rank's micro-batch: [2, 12]."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + 10 * step + n)
    return torch.randint(1, 250, (2, 12), generator=generator)


def forward(model, ids):
    return model(input_ids=ids, use_cache=False).logits.float()


def named(model):
    return {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}


def shards(model):
    return {n: (p._local_tensor if isinstance(p, DTensor) else p.detach()) for n, p in named(model).items()}


def whole(model):
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in named(model).items()}


def same(one, other):
    assert one.keys() == other.keys() and len(one) > 10
    return all(torch.equal(one[name], other[name]) for name in one)


def separate(weights, ids, strategy, dtype):
    """The logits of another model with these weights, not wrapped, in the precision that the strategy computes in."""
    model, _ = load(ModelConf(architecture=Architecture.qwen3_dense))
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].clone()
        if strategy is not Strategy.no_shard:
            parameter.data = parameter.data.to(dtype)  # not the buffers: the rotary frequencies stay fp32
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        return forward(model, ids)


def train(accelerator, model, optimizer, reference, seen):
    """Steps of two micro-batches. `seen` gets the logits of a reference pass at each place where one may be."""
    losses = []
    for step in range(STEPS):
        for n in range(2):
            if reference:
                with reference.in_place(model):
                    seen.append(forward(model, token_ids(0, 0)))
            with synchronise_gradients(model, accelerator, last=n == 1):
                ids = token_ids(step, n)
                loss = -forward(model, ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()
                accelerator.backward(loss)
            losses.append(loss.item())
        before = {name: parameter.grad for name, parameter in named(model).items()}
        if reference:  # between backward and step, two forwards
            with reference.in_place(model):
                assert not torch.is_grad_enabled()
                seen.extend(forward(model, token_ids(0, 0)) for _ in range(2))
        assert all(parameter.grad is before[name] for name, parameter in named(model).items())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def optimizer_state(optimizer):
    """This rank's shards."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value._local_tensor if isinstance(value, DTensor) else value for value in values]


def check(strategy, dtype, device, folder):
    close = dict(rtol=0, atol=1e-4 if dtype is torch.float32 else 0.1)
    untrained, _ = load(ModelConf(architecture=Architecture.qwen3_dense))
    start = {name: parameter.detach() for name, parameter in untrained.named_parameters()}
    expected = separate(start, token_ids(0, 0), strategy, dtype)

    accelerator, model, optimizer = prepare(strategy, dtype)
    assert make_reference(model, KLConf()) is None
    losses = train(accelerator, model, optimizer, None, [])
    policy, moments = copy.deepcopy(shards(model)), copy.deepcopy(optimizer_state(optimizer))

    accelerator, model, optimizer = prepare(strategy, dtype)
    fails_inside(make_reference(model, KL[device]), model, lambda: torch.load(folder / "nothing"), FileNotFoundError)
    with torch.no_grad():
        forward(model, token_ids(0, 0))  # leaves the head gathered, and with shard_grad_op every layer
    reference, seen = make_reference(model, KL[device]), []
    held = sum(parameter.numel() for parameter in shards(model).values() if parameter.numel())
    trained = sum(shards(model)[name].numel() for name, parameter in named(model).items() if parameter.requires_grad)
    assert sum(copied.numel() for copied in reference._shards) == trained
    assert trained < held if strategy is Strategy.shard_grad_op else trained == held
    places = {name: shard.data_ptr() for name, shard in shards(model).items()}

    # The policy trains as without a reference, bitwise; the reference's logits are those of a model of its own.
    assert train(accelerator, model, optimizer, reference, seen) == losses
    assert same(shards(model), policy)
    assert all(map(torch.equal, optimizer_state(optimizer), moments)) and len(moments) > 30
    assert {name: shard.data_ptr() for name, shard in shards(model).items()} == places
    assert len(seen) == 4 * STEPS
    for logits in seen:
        torch.testing.assert_close(logits, expected, **close)
    with torch.no_grad():
        trained_logits = forward(model, token_ids(0, 0))
    assert (trained_logits - expected).abs().max() > 20 * close["atol"]
    with reference.in_place(model):
        assert same(whole(model), start)
        with gathered(model) as bare:  # ranks may run different numbers of forwards inside
            for _ in range(1 + dist.get_rank() % 2):
                logits = forward(bare, token_ids(0, 0))
        torch.testing.assert_close(logits, expected, **close)
    assert same(shards(model), policy)
    with torch.no_grad():
        assert torch.equal(forward(model, token_ids(0, 0)), trained_logits)

    # After an exception, also on the way through a forward, the model is the policy.
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.2"))
    hook = layer.register_forward_pre_hook(lambda *_: [][0])
    fails_inside(reference, model, lambda: forward(model, token_ids(0, 0)), IndexError)
    hook.remove()
    with torch.no_grad():
        assert torch.equal(forward(model, token_ids(0, 0)), trained_logits)
    with reference.in_place(model):
        torch.testing.assert_close(forward(model, token_ids(0, 0)), expected, **close)
    assert same(shards(model), policy)

    # The reference moves; a step after a no_grad forward that leaves whole weights behind.
    with torch.no_grad():
        forward(model, token_ids(0, 0))
    reference.refresh(model, 0.25)
    now = whole(model)
    moved = {name: 0.75 * start[name] + 0.25 * now[name] for name in now}
    with reference.in_place(model):
        found = whole(model)
        logits = forward(model, token_ids(0, 0))
    for name in moved:
        torch.testing.assert_close(found[name], moved[name], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(logits, separate(moved, token_ids(0, 0), strategy, dtype), **close)
    assert (logits - expected).abs().max() > 2 * close["atol"]
    if strategy is not Strategy.shard_grad_op:  # its frozen weights are not in the other's reference
        resume(model, optimizer, reference, strategy, folder, now, found)
    reference.refresh(model, 1.0)
    with reference.in_place(model):
        assert same(whole(model), now)


def save(model, optimizer, folder, step, reference):
    saver = Saver(folder, CheckpointConf(keep_last=0), "eval/reward", 60)
    saver.save(model, optimizer, reference, step, generator_states(), {}, {})
    saver.wait()


def holds_reference(folder):
    held = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return any(name.startswith("reference.") for name in held)


def moments(model, optimizer):
    """The optimizer's state as whole tensors, by parameter and name."""
    found = {}
    for name, parameter in named(model).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[name, key] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return found


def resume(model, optimizer, reference, strategy, folder, policy, moved):
    """What two ranks save under any strategy, any number restore under any other, Adam's state too.

    A reference that has not moved is not in a checkpoint.
    """
    folder /= "saved"
    first = dist.get_world_size() == 2 and not folder.exists()
    dist.barrier()
    if first:
        folder.mkdir(exist_ok=True)
        save(model, optimizer, folder, 7, reference)
        expected = policy, moved, moments(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(expected, folder / "expected.pt")
        dist.barrier()
    (of_two,) = checkpoint.complete(folder)
    policy, moved, state = torch.load(folder / "expected.pt")

    _, model, optimizer = prepare(strategy, torch.float32)
    reference, start = make_reference(model, KL[ReferenceDevice.cpu]), whole(model)
    new = folder / f"{strategy}_{dist.get_world_size()}"
    new.mkdir(exist_ok=True)
    save(model, optimizer, new, 1, reference)
    assert checkpoint.damage(of_two) is None
    found, notes = checkpoint.load(model, optimizer, of_two, reference)
    assert found.step == 7 and bool(notes) == (dist.get_world_size() != 2)
    assert same(whole(model), policy) and not same(policy, moved)
    assert same(moments(model, optimizer), state)
    with reference.in_place(model):
        assert same(whole(model), moved)
    assert same(whole(model), policy)
    save(model, optimizer, new, 7, reference)  # it has moved, though nothing here moves it
    without, with_one = checkpoint.complete(new)
    assert [holds_reference(path) for path in (without, with_one)] == [False, True]

    _, model, optimizer = prepare(strategy, torch.float32)
    reference = make_reference(model, KL[ReferenceDevice.sharded])
    assert checkpoint.load(model, optimizer, without, reference)[0].step == 1 and not reference.moved
    assert not moments(model, optimizer)
    with reference.in_place(model):
        assert same(whole(model), start)
    assert checkpoint.load(model, optimizer, with_one, reference)[0].step == 7 and reference.moved
    with reference.in_place(model):
        assert same(whole(model), moved)
    found, notes = checkpoint.load(model, optimizer, with_one)
    assert found.step == 7 and "the reference policy of the checkpoint is not used" in notes[0]
    assert same(whole(model), policy)


def fails_inside(reference, model, run, error):
    try:
        with reference.in_place(model):
            run()
    except error:
        return
    raise AssertionError("the exception is lost")


def check_all(folder, cases):
    for n, case in enumerate(cases):
        strategy, dtype = case.split("-")
        check(Strategy(strategy), DTYPES[dtype], list(ReferenceDevice)[n % 2], folder)
    dist.barrier()
    print(f"checked {','.join(cases)} on rank {dist.get_rank()} of {dist.get_world_size()}")
