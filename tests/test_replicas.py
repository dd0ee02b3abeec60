"""Several ranks: equal to torch on averaged gradients, and equal to one another bit for bit."""

import pytest
import torch
import torch.distributed as dist

import fusedcomp
from fusedcomp import Identity, MomentumCorrection, NoMemory, Residual, TopK
from ranks import average_gradients, batch, digest, loss_of, net, run

STEPS = 50
# Plain, momentum, Nesterov with decay, maximised, and momentum that a scheduler changes.
SETTINGS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    {"momentum": 0.5, "weight_decay": 1e-2, "maximize": True},
    {"momentum": 0.9, "weight_decay": 1e-3, "cycle": True},
]
FRONTS = {
    "identity": {"compressor": Identity()},
    "identity_no_overlap": {"compressor": Identity(), "overlap": False},
    "density_1_sparse": {"compressor": TopK(1.0), "memory": MomentumCorrection(masking=False), "_always_sparse": True},
    "density_1_dense_step": {"compressor": TopK(1.0)},
    "density_1_residual": {"compressor": TopK(1.0), "memory": Residual(), "_always_sparse": True},
    "density_1_tensor": {
        "compressor": TopK(1.0, scope="tensor"),
        "memory": MomentumCorrection(masking=False),
        "_always_sparse": True,
        "bucket_cap_mb": 0.02,
    },
}


def distance_from_torch(rank: int, world: int, front: dict, setting: dict) -> float:
    """Largest difference over 50 steps, relative to the largest parameter."""
    setting = dict(setting)
    cycle = setting.pop("cycle", False)
    ours, theirs = net(), net()
    optimizer = fusedcomp.SGD(ours.parameters(), lr=0.05, **setting, **front)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.05, **setting)
    schedulers = [
        torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.05, step_size_up=10, cycle_momentum=True, base_momentum=0.7)
        if cycle
        else torch.optim.lr_scheduler.StepLR(o, 20, 0.5)
        for o in (optimizer, reference)
    ]
    for step in range(STEPS):
        for model, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            loss = loss_of(model, rank, step)
            (-loss if setting.get("maximize") else loss).backward()
            if opt is reference and world > 1:
                average_gradients(model)
            opt.step()
        for scheduler in schedulers:
            scheduler.step()
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    return max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs)


def all_distances(rank: int, world: int) -> dict[str, float]:
    # All settings on two ranks of the plain fronts; else the two that cover most. Four ranks share two cores.
    plain = ("identity", "density_1_sparse")
    return {
        f"{front}-{setting}": distance_from_torch(rank, world, FRONTS[front], setting)
        for front in (FRONTS if world < 4 else plain)
        for setting in (SETTINGS if world == 2 and front in plain else SETTINGS[2::2])
    }


@pytest.mark.parametrize("world", [1, 2, 4])
def test_everything_sent_is_torch_sgd(world: int) -> None:
    """Identity, and density 1 with masking off: torch.optim.SGD on averaged gradients to fp32 rounding."""
    for distances in run(all_distances, world):
        # 50 steps of a smooth net amplify one rounding (6e-8) by about a hundred; one wrong term gives 1e-2.
        assert all(d < 3e-5 for d in distances.values()), distances


COMPRESSED = {
    "topk": lambda p: fusedcomp.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4, compressor=TopK(0.01)),
    "sampled_tensor": lambda p: fusedcomp.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, compressor=TopK(0.02, selection="sampled", scope="tensor")
    ),
    "residual": lambda p: fusedcomp.SGD(p, lr=0.05, momentum=0.9, compressor=TopK(0.01), memory=Residual()),
    "no_memory": lambda p: fusedcomp.SGD(p, lr=0.05, compressor=TopK(0.1), memory=NoMemory()),
    "warmup": lambda p: fusedcomp.SGD(
        p, lr=0.05, momentum=0.9, compressor=TopK(0.005, warmup_steps=60), bucket_cap_mb=0.05
    ),
    "lars": lambda p: fusedcomp.LARS(p, lr=1.0, trust_coefficient=0.01, weight_decay=1e-4, compressor=TopK(0.01)),
    "lars_identity": lambda p: fusedcomp.LARS(p, lr=1.0, trust_coefficient=0.01, weight_decay=1e-4),
}


def train(rank: int, world: int, name: str, steps: int) -> tuple[bytes, float, float]:
    model = net(seed=rank)  # different on every rank: rank 0's values are broadcast
    optimizer = COMPRESSED[name](model.parameters())
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step % 4)  # four batches, to be learned by heart
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return digest(model), losses[0], losses[-1]


def train_all(rank: int, world: int, names: list[str]) -> dict[str, tuple[bytes, float, float]]:
    return {name: train(rank, world, name, steps=120) for name in names}


@pytest.mark.parametrize(("world", "names"), [(2, [*COMPRESSED]), (4, ["topk", "lars"])], ids=["2", "4"])
def test_replicas_are_bit_identical_and_runs_repeat(world: int, names: list[str]) -> None:
    first, second = run(train_all, world, names), run(train_all, world, names)
    for name in names:
        bits = {result[name][0] for result in first} | {result[name][0] for result in second}
        assert len(bits) == 1, f"{name}: {len(bits)} different results on {world} ranks in two runs"
        start, end = first[0][name][1:]
        assert end < 0.7 * start, f"{name} does not learn: loss {start:.3f} -> {end:.3f}"


def lars_reference(rank: int, world: int) -> float:
    """LARS with Identity against the published equations in float64."""
    ours, theirs = net(), net().double()
    setting = {"lr": 0.5, "momentum": 0.9, "weight_decay": 1e-3}
    eta, eps = 0.01, 1e-8
    optimizer = fusedcomp.LARS(ours.parameters(), trust_coefficient=eta, eps=eps, **setting)
    buffers = [torch.zeros_like(p) for p in theirs.parameters()]
    for step in range(30):
        optimizer.zero_grad()
        loss_of(ours, rank, step).backward()
        optimizer.step()
        theirs.zero_grad()
        inputs, targets = batch(rank, step)
        torch.nn.functional.cross_entropy(theirs(inputs.double()), targets).backward()
        average_gradients(theirs)
        with torch.no_grad():
            for param, buffer in zip(theirs.parameters(), buffers, strict=True):
                grad = param.grad
                if param.ndim > 1:
                    w, g = param.norm(), grad.norm()
                    trust = eta * w / (g + setting["weight_decay"] * w + eps) if w > 0 and g > 0 else 1.0
                    grad = trust * (grad + setting["weight_decay"] * param)
                buffer.mul_(setting["momentum"]).add_(grad)
                param.sub_(setting["lr"] * buffer)
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs)


def test_lars_identity_is_the_published_rule() -> None:
    assert max(run(lars_reference, 2)) < 1e-4


def groups(rank: int, world: int) -> tuple[bytes, int]:
    """A process group of the user's choice: ranks 0 and 2 exchange, 1 and 3 do among themselves."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = net(seed=rank)
    optimizer = fusedcomp.SGD(
        model.parameters(), lr=0.05, momentum=0.9, compressor=TopK(0.01), process_group=pairs[rank % 2]
    )
    for step in range(20):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return digest(model), rank % 2


def test_process_groups_of_the_users_choice() -> None:
    results = run(groups, 4)
    assert results[0][0] == results[2][0]
    assert results[1][0] == results[3][0]
    assert results[0][0] != results[1][0]
