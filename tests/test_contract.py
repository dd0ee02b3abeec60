"""The backward contract: misuse raises on every rank with the way out, and leaves replicas equal and usable."""

import time
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedcomp
from fusedcomp import TopK
from ranks import average_gradients, batch, digest, loss_of, message_of, net, run


def optimizer_for(model: nn.Module, **kwargs: object) -> fusedcomp.SGD:
    options = {"lr": 0.05, "momentum": 0.9, "compressor": TopK(0.01), "bucket_cap_mb": 0.05} | kwargs
    return fusedcomp.SGD(model.named_parameters(), **options)


def step_ok(model: nn.Module, optimizer: fusedcomp.SGD, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


def second_backward(model: nn.Module, optimizer: fusedcomp.SGD, rank: int) -> None:
    for step in (0, 1):
        loss_of(model, rank, step).backward()


def clipped(model: nn.Module, optimizer: fusedcomp.SGD, rank: int) -> None:
    loss_of(model, rank, 0).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def unscaled(model: nn.Module, optimizer: fusedcomp.SGD, rank: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model, rank, 0)).backward()
    scaler.step(optimizer)


def replaced(model: nn.Module, optimizer: fusedcomp.SGD, rank: int) -> None:
    loss_of(model, rank, 0).backward()
    model[0].weight.grad = model[0].weight.grad.clone()
    optimizer.step()


def removed(model: nn.Module, optimizer: fusedcomp.SGD, rank: int) -> None:
    loss_of(model, rank, 0).backward()
    model.zero_grad()
    optimizer.step()


def zeroed(model: nn.Module, optimizer: fusedcomp.SGD, rank: int) -> None:
    loss_of(model, rank, 0).backward()
    optimizer.zero_grad()


def loaded(model: nn.Module, optimizer: fusedcomp.SGD, rank: int) -> None:
    saved = optimizer.state_dict()
    loss_of(model, rank, 0).backward()
    optimizer.load_state_dict(saved)


MISUSE = {
    second_backward: "no_sync",
    clipped: "overlap=False",
    unscaled: "unscale_",
    replaced: "'0.weight'",
    removed: "was changed between backward() and step()",
    zeroed: "zero_grad()",
    loaded: "load_state_dict()",
}


def misuse_everywhere(rank: int, world: int) -> list[tuple[str, str, bytes]]:
    results = []
    for action in MISUSE:
        model = net()
        optimizer = optimizer_for(model)
        step_ok(model, optimizer, rank, 5)
        message = message_of(lambda a=action, m=model, o=optimizer: a(m, o, rank))
        for step in (6, 7):  # the next steps work
            step_ok(model, optimizer, rank, step)
        results.append((action.__name__, message, digest(model)))
    return results


def test_misuse_raises_on_every_rank_and_the_next_step_works() -> None:
    for (name, message, bits), (_, other, other_bits) in zip(*run(misuse_everywhere, 2), strict=True):
        expected = next(text for action, text in MISUSE.items() if action.__name__ == name)
        assert message.startswith("RuntimeError"), f"{name}: {message}"
        assert expected in message, f"{name}: {message}"
        assert message == other
        assert bits == other_bits, f"replicas differ after {name}"


def misuse_on_one_rank(rank: int, world: int) -> list[tuple[str, str, bytes, bytes]]:
    results = []
    for action in (second_backward, zeroed):
        model = net()
        optimizer = optimizer_for(model)
        step_ok(model, optimizer, rank, 5)
        if rank == 1:
            message = message_of(lambda a=action, m=model, o=optimizer: a(m, o, rank))
        else:
            loss_of(model, rank, 0).backward()
            message = message_of(optimizer.step)
        after = digest(model)
        for step in (6, 7):
            step_ok(model, optimizer, rank, step)
        results.append((action.__name__, message, after, digest(model)))
    return results


def test_misuse_on_one_rank_reaches_all() -> None:
    """The rank that failed finishes the step with empty payloads; nobody waits, all apply the same, all raise."""
    for innocent, guilty in zip(*run(misuse_on_one_rank, 2), strict=True):
        assert "another rank failed" in innocent[1]
        assert "another rank" not in guilty[1]
        assert innocent[2:] == guilty[2:]


def converted_step(model: nn.Module, optimizer: fusedcomp.SGD, rank: int, after: bool) -> None:
    """Rank 1 converts its model, before backward or after it."""
    inputs, targets = batch(rank, 6)
    if rank == 1 and not after:
        model.half()
    nn.functional.cross_entropy(model(inputs.to(model[0].weight.dtype)).float(), targets).backward()
    if rank == 1 and after:
        model.half()
        optimizer.zero_grad()
    optimizer.step()


def converted(rank: int, world: int) -> list[tuple[str, str, float]]:
    results = []
    for after, overlap, compressor in product((False, True), (False, True), (fusedcomp.Identity(), TopK(0.01))):
        model = net()
        optimizer = optimizer_for(model, compressor=compressor, overlap=overlap)
        step_ok(model, optimizer, rank, 5)
        start, messages = time.monotonic(), []
        for _ in range(2):  # it stays so until the optimizer is built anew
            messages.append(message_of(lambda m=model, o=optimizer, a=after: converted_step(m, o, rank, a)))
            model.zero_grad()
        results.append((*messages, time.monotonic() - start))
    return results


def test_a_model_converted_on_one_rank_reaches_all() -> None:
    """Nothing is applied where parameters are not what they were: a kernel would write past them."""
    for innocent, guilty in zip(*run(converted, 2), strict=True):
        for message in innocent[:2]:
            assert "another rank failed" in message
        for message in guilty[:2]:
            assert "torch.float16" in message, message
            assert "build it after moving or converting the model" in message
        assert innocent[2] < 20


def gone(rank: int, world: int) -> tuple[str, float]:
    model = net()
    optimizer = optimizer_for(model)
    step_ok(model, optimizer, rank, 5)
    dist.barrier()
    if rank == 1:
        # Its peers see the closed connection, not a silent one.
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the test's own barrier
        return "gone", 0.0
    start = time.monotonic()
    loss_of(model, rank, 0).backward()
    message = message_of(optimizer.step)
    elapsed = time.monotonic() - start
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return message, elapsed


def test_a_rank_that_is_gone_is_reported_in_bounded_time() -> None:
    message, elapsed = run(gone, 2)[0]
    assert "RuntimeError" in message
    assert "'6.weight'" in message, message  # the parameters of the bucket are named
    assert elapsed < 60


def accumulated(rank: int, world: int) -> float:
    """no_sync: three micro-steps, a parameter that only the first uses; equal to torch on summed gradients."""
    ours, theirs = (nn.ModuleList([net(), nn.Linear(10, 256), nn.Linear(256, 10)]) for _ in range(2))
    for target, source in zip(theirs.parameters(), ours.parameters(), strict=True):
        target.data.copy_(source.data)

    def loss(model: nn.ModuleList, step: int, extra: bool) -> torch.Tensor:
        inputs, targets = batch(rank, step)
        hidden = model[0](inputs)
        if extra:
            hidden = hidden + model[2](torch.tanh(model[1](hidden)))
        return nn.functional.cross_entropy(hidden, targets) / 3

    optimizer = fusedcomp.SGD(ours.parameters(), lr=0.05, momentum=0.9)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9)
    for step in range(10):
        optimizer.zero_grad()
        reference.zero_grad()
        with optimizer.no_sync():
            loss(ours, 3 * step, extra=True).backward()
            loss(ours, 3 * step + 1, extra=False).backward()
        loss(ours, 3 * step + 2, extra=False).backward()
        optimizer.step()
        for micro in range(3):
            loss(theirs, 3 * step + micro, extra=micro == 0).backward()
        average_gradients(theirs)
        reference.step()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((a - b).abs().max().detach()) for a, b in pairs)


def test_accumulation_in_no_sync() -> None:
    assert max(run(accumulated, 2)) < 1e-5


def partly_unused(rank: int, world: int, sparse: bool) -> dict[str, object]:
    """A branch that only rank 0 uses in even steps, and one that nobody ever uses."""
    ours = nn.ModuleDict({"net": net(), "branch": nn.Linear(64, 64), "never": nn.Linear(64, 64)})
    theirs = nn.ModuleDict({"net": net(), "branch": nn.Linear(64, 64), "never": nn.Linear(64, 64)})
    setting = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
    compressor = TopK(0.01) if sparse else fusedcomp.Identity()
    optimizer = fusedcomp.SGD(ours.parameters(), **setting, compressor=compressor)
    theirs.load_state_dict(ours.state_dict())
    reference = torch.optim.SGD(theirs.parameters(), **setting)
    never = ours["never"].weight.detach().clone()

    def loss(model: nn.ModuleDict, step: int) -> torch.Tensor:
        inputs, targets = batch(rank, step)
        hidden = model["net"][:7](inputs)
        if rank == 0 and step % 2 == 0:
            hidden = hidden + torch.tanh(model["branch"](hidden))
        return nn.functional.cross_entropy(model["net"][7:](hidden), targets)

    for step in range(20):
        optimizer.zero_grad()
        loss(ours, step).backward()
        optimizer.step()
        reference.zero_grad()
        loss(theirs, step).backward()
        if step % 2 == 0:  # None on some ranks is a zero gradient, None on all is a parameter to skip
            for param in theirs["branch"].parameters():
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        average_gradients(theirs)
        reference.step()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    state = optimizer.state[ours["branch"].weight]
    return {
        "bits": digest(ours),
        "never_moved": torch.equal(ours["never"].weight, never),
        "distance": max(float((a - b).abs().max().detach()) for a, b in pairs),
        "branch_state": float(next(iter(state.values())).abs().sum()),
    }


@pytest.mark.parametrize("sparse", [False, True], ids=["identity", "topk"])
def test_parameters_without_gradient_on_some_or_all_ranks(sparse: bool) -> None:
    zero, one = run(partly_unused, 2, sparse)
    assert zero["bits"] == one["bits"]
    assert zero["never_moved"]
    assert zero["branch_state"] > 0
    assert one["branch_state"] > 0  # rank 1 never has a gradient: its velocity takes part in decay all the same
    if not sparse:
        assert zero["distance"] < 1e-5


DIFFERENT = {
    "density": lambda r: ({"compressor": TopK(0.01 * (1 + r))}, net()),
    "scope": lambda r: ({"compressor": TopK(0.01, scope=("bucket", "tensor")[r])}, net()),
    "lr": lambda r: ({"lr": 0.1 + r}, net()),
    "bucket_cap_mb": lambda r: ({"bucket_cap_mb": 1.0 + r}, net()),
    "overlap": lambda r: ({"overlap": bool(r)}, net()),
    "parameter 0 of group 0 is '0.weight', torch.float32 (2, 3)": lambda r: ({}, nn.Sequential(nn.Linear(3 + r, 2))),
    "number of parameters": lambda r: ({}, nn.Sequential(nn.Linear(3, 2, bias=bool(r)))),
}


def differing(rank: int, world: int) -> list[str]:
    return [
        message_of(lambda s=setting, m=model: optimizer_for(m, **s))
        for setting, model in (make(rank) for make in DIFFERENT.values())
    ]


def test_ranks_built_differently_are_refused_by_field() -> None:
    zero, one = run(differing, 2)
    for field, message, other in zip(DIFFERENT, zero, one, strict=True):
        assert message.startswith("ValueError: ranks were given different settings"), message
        assert field in message, message
        assert message == other


# What only rank 1 gets wrong, before the ranks have agreed.
REFUSED = {
    "lr": lambda p: fusedcomp.SGD(p, lr=-1.0),
    "state_dtype": lambda p: fusedcomp.SGD(p, state_dtype=torch.float64),
    "fused": lambda p: fusedcomp.SGD(p, fused=True),
    "is torch.float64": lambda p: fusedcomp.SGD([*p, nn.Parameter(torch.zeros(3, dtype=torch.float64))], lr=0.1),
    "empty": lambda p: fusedcomp.LARS([], lr=0.1),
    "process_group must be": lambda p: fusedcomp.SGD(p, process_group="x"),
}


def refused_on_one_rank(rank: int, world: int) -> tuple[list[str], float, bytes]:
    start, messages = time.monotonic(), []
    for build in REFUSED.values():
        made = build if rank == 1 else lambda p: fusedcomp.SGD(p, lr=0.1)
        messages.append(message_of(lambda make=made: make(net().parameters())))
    model, extra = net(), nn.Linear(8, 8)
    optimizer = optimizer_for(model)
    group = {"params": list(extra.named_parameters()), "momentum": 0.5 + rank}
    messages.append(message_of(lambda: optimizer.add_param_group(group)))
    step_ok(model, optimizer, rank, 0)  # the group is gone on all ranks
    return messages, time.monotonic() - start, digest(model)


def test_an_argument_refused_on_one_rank_is_refused_on_all() -> None:
    """At once, not after the process group's timeout; the rank that got it wrong says what."""
    innocent, guilty = run(refused_on_one_rank, 2)
    for own, message, other in zip([*REFUSED, "momentum"], guilty[0], innocent[0], strict=True):
        assert own in message
        assert other == "ValueError: rank 1 refused its arguments; its own error says why"
    assert max(innocent[1], guilty[1]) < 20
    assert innocent[2] == guilty[2]


def two_optimizers(rank: int, world: int) -> tuple[bytes, bytes]:
    """Buckets launch in different orders on the ranks, with a collective of the user's in between."""
    models = [net(1), net(2)]
    optimizers = [optimizer_for(model) for model in models]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        used = models[:1] if rank == 1 and step == 1 else models[:: 1 if rank == 0 else -1]
        sum(loss_of(model, rank, step) for model in used).backward()
        dist.all_reduce(torch.ones(1))
        for optimizer in optimizers:
            optimizer.step()
    return digest(models[0]), digest(models[1])


def test_other_collectives_do_not_mix_with_ours() -> None:
    zero, one = run(two_optimizers, 2)
    assert zero == one


def differing_group(rank: int, world: int) -> tuple[str, bytes]:
    model, extra = net(), nn.Linear(5, 8 + rank)
    optimizer = fusedcomp.SGD(model.parameters(), lr=0.05, compressor=TopK(0.01))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    message = message_of(lambda: optimizer.add_param_group({"params": list(extra.parameters())}))
    step_ok(model, optimizer, rank, 0)
    return message, digest(model)


def test_a_differing_param_group_is_taken_back() -> None:
    """It is called by its number, and both shapes are shown, though the parameters have no names."""
    zero, one = run(differing_group, 2)
    assert zero[0] == (
        "ValueError: ranks were given different settings: parameter 0 of group 2 is torch.float32 (8, 5), strides "
        "[5, 1] on rank 0, torch.float32 (9, 5), strides [5, 1] on rank 1"
    )
    assert zero == one


def overlapping_groups(rank: int, world: int) -> list[bytes]:
    """Optimizers on the world and on subgroups, in orders that differ between ranks as far as they can."""
    pairs = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (0, 2), (1, 2))}
    results = []

    def trained(process_group: object) -> None:
        model = net()
        optimizer = optimizer_for(model, process_group=process_group)
        step_ok(model, optimizer, rank, 0)
        results.append(digest(model))

    for ranks in ((0, 1), None, (0, 1), (0, 1), (0, 2), (1, 2), None, (0, 1), None):
        if ranks is None:
            trained(None)
        elif rank in ranks:
            trained(pairs[ranks])
    if rank < 2:  # where groups went, names come back
        dist.destroy_process_group(pairs[0, 1])
        trained(dist.new_group([0, 1], use_local_synchronization=True))
    return results


def test_optimizers_on_subgroups_and_on_the_world_do_not_wait_for_each_other() -> None:
    """Ranks that know different numbers of process groups name a new one alike."""
    zero, one, two = run(overlapping_groups, 3)
    assert zero[:4] == one[:4]  # (0, 1), world, (0, 1), (0, 1)
    assert zero[4] == two[1]
    assert one[4] == two[2]
    assert zero[5] == one[5] == two[3]
    assert zero[6] == one[6]
    assert zero[1] == two[0]
    assert zero[7] == one[7] == two[4]
    assert zero[8] == one[8]


def wrapped(rank: int, world: int) -> str:
    model = net()
    optimizer = optimizer_for(model)
    wrapper = nn.parallel.DistributedDataParallel(model)
    loss_of(wrapper, rank, 0).backward()
    return message_of(optimizer.step)


def test_a_wrapper_left_around_the_model_is_named() -> None:
    for message in run(wrapped, 2):
        assert "remove the DistributedDataParallel wrapper" in message
