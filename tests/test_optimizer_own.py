"""What torch's optimizers do not have: residuals, metrics, trust ratios, choices that change, two implementations."""

import pytest
import torch
from torch import nn

import fusedcomp
from fusedcomp import LARS, SGD, Identity, MomentumCorrection, NoMemory, Residual, TopK, _dispatch
from fusedcomp.kernels.headers import TRAILER_WORDS
from ranks import digest, loss_of, net, train

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of what calls kernels and twins directly


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_leaves_the_residual_alone(set_to_none: bool) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, compressor=TopK(0.01))
    train(model, optimizer, 3)
    before = optimizer.state[model[6].weight]["residual"].clone()
    optimizer.zero_grad(set_to_none=set_to_none)
    assert torch.equal(optimizer.state[model[6].weight]["residual"], before)
    assert before.any()


def test_residual_survives_other_bucket_sizes() -> None:
    models = [net(), net()]
    small, large = (
        SGD(m.parameters(), lr=0.05, momentum=0.9, compressor=TopK(0.01, scope="tensor"), bucket_cap_mb=cap)
        for m, cap in zip(models, (0.01, 25.0), strict=True)
    )
    for model, optimizer in zip(models, (small, large), strict=True):
        train(model, optimizer, 20)
    assert digest(models[0]) == digest(models[1]), 'scope="tensor" must not depend on bucket sizes'
    large.load_state_dict(small.state_dict())
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        for name, value in small.state[a].items():
            assert torch.equal(value, large.state[b][name])


def test_metrics() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, compressor=TopK(0.01))
    train(model, optimizer, 3)
    metrics = optimizer.metrics()
    dense = 4 * sum(p.numel() for p in model.parameters())
    large = [p for p in model.parameters() if p.ndim > 1 and p.numel() >= 2048]
    assert int(metrics["bytes_dense"]) == dense
    assert int(metrics["nnz"]) == -(-sum(p.numel() for p in large) // 100)
    assert 0 < int(metrics["bytes_sent"]) < dense / 10
    expected = sum(float(optimizer.state[p]["residual"].square().sum()) for p in large) ** 0.5
    assert float(metrics["residual_norm"]) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["threshold"]) > 0
    assert int(metrics["nonfinite"]) == int(metrics["overflow"]) == 0
    model[0].bias.grad = torch.full_like(model[0].bias, float("nan"))
    optimizer._backward.reset()
    optimizer.step()
    assert int(optimizer.metrics()["nonfinite"]) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_bytes_are_those_of_the_parameters(dtype: torch.dtype) -> None:
    """What DDP would send: 16-bit gradients of 16-bit parameters, though ours are summed in fp32."""
    model = nn.Linear(64, 64).to(dtype)
    optimizer = SGD(model.parameters(), lr=0.1, compressor=TopK(0.01))
    model(torch.ones(2, 64, dtype=dtype)).sum().backward()
    optimizer.step()
    assert int(optimizer.metrics()["bytes_dense"]) == dtype.itemsize * (64 * 64 + 64)


@pytest.mark.parametrize("compressor", [Identity(), TopK(0.1)], ids=["identity", "topk"])
def test_metrics_keep_their_types(compressor: object) -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    metrics = SGD([weight], lr=0.1, compressor=compressor).metrics()
    assert {name: value.dtype for name, value in metrics.items() if value.dtype != torch.int64} == {
        "threshold": torch.float32, "residual_norm": torch.float32,
    }  # fmt: skip


@pytest.mark.parametrize(("memory", "norm"), [(Residual(), 1e30 * (4096 - 41) ** 0.5), (NoMemory(), 0.0)])
def test_the_residual_norm_neither_overflows_nor_counts_scratch(memory: object, norm: float) -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = SGD([weight], lr=0.1, compressor=TopK(0.01), memory=memory)
    weight.grad = torch.full((64, 64), 1e30)
    optimizer.step()
    assert float(optimizer.metrics()["residual_norm"]) == pytest.approx(norm, rel=1e-6)


def test_nothing_is_sent_that_is_larger_than_raw() -> None:
    """Whatever the shapes and the density, a bucket is handed over as at most its raw bytes and the trailer."""
    for density in (0.001, 0.1, 0.5, 0.9, 1.0):
        for shape in ((1, 2048), (3, 5), (64, 65), (300, 400)):
            weight = nn.Parameter(torch.randn(shape))
            optimizer = SGD([weight], lr=0.1, compressor=TopK(density))
            weight.grad = torch.randn(shape)
            optimizer.step()
            assert int(optimizer.metrics()["bytes_sent"]) <= 4 * (weight.numel() + 1 + TRAILER_WORDS)


def test_entries_sent_densely_leave_no_residual() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, compressor=TopK(1.0))
    train(model, optimizer, 5)
    assert not any(states["residual"].any() for states in optimizer.state.values() if "residual" in states)


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-42, 3e38, -3e38])
def test_degenerate_gradients_stay_finite(value: float) -> None:
    """Blocks of equal values, zeros, denormals, the largest numbers."""
    weight = nn.Parameter(torch.zeros(70, 70))
    optimizer = SGD([weight], lr=1e-3, compressor=TopK(0.1))
    for _ in range(3):
        weight.grad = torch.full((70, 70), value)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.isfinite(weight).all() == (abs(value) < 1e38)  # 3 x 3e38 overflows in any optimizer
    if value == 0.0:
        assert not weight.any()


@pytest.mark.parametrize("compressor", [Identity(), TopK(0.5)], ids=["identity", "topk"])
@pytest.mark.parametrize("zero", ["weight", "gradient"])
def test_lars_trust_is_one_where_a_norm_is_zero(compressor: object, zero: str) -> None:
    """A weight that starts at zero moves with the plain learning rate; a zero gradient moves nothing."""
    weight = nn.Parameter(torch.zeros(64, 64) if zero == "weight" else torch.ones(64, 64))
    optimizer = LARS([weight], lr=0.5, momentum=0.0, compressor=compressor)
    weight.grad = torch.ones(64, 64) if zero == "weight" else torch.zeros(64, 64)
    before = weight.detach().clone()
    optimizer.step()
    moved = before - weight.detach()
    expected = 0.5 if zero == "weight" else 0.0
    assert set(moved.unique().tolist()) <= {0.0, expected}
    assert moved.any() == (zero == "weight")


def test_lars_first_gradient_after_zeros_is_scaled() -> None:
    """Zero-initialised branches give exact zeros first: the first real gradient must not meet a trust ratio of 1."""
    weight = nn.Parameter(torch.ones(64, 64))
    optimizer = LARS([weight], lr=1.0, momentum=0.0, trust_coefficient=1e-3, compressor=TopK(1.0))
    for grad in (torch.zeros(64, 64), torch.full((64, 64), 100.0)):
        optimizer.zero_grad()
        weight.grad = grad
        optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((64, 64), 1.0 - 1e-3), rtol=1e-4, atol=1e-6)


def test_lars_after_a_tiny_gradient_moves_about_as_usual() -> None:
    """The ratio comes from the last norm: one step of next to nothing must not multiply the next one by a million."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 64, generator=generator))
    optimizer = LARS([weight], lr=1e-3, momentum=0.0, compressor=TopK(1.0), _always_sparse=True)
    moved = []
    for scale in (1.0, 1e-6, 1.0, 1.0):
        before = weight.detach().clone()
        weight.grad = scale * torch.randn(64, 64, generator=generator)
        optimizer.step()
        moved.append(float((weight.detach() - before).norm()))
    assert 1.05 < moved[2] / moved[0] < 1.2
    assert moved[3] == pytest.approx(moved[0], rel=0.05)


@pytest.mark.parametrize("kernels", [False, True], ids=["twin", "kernel"])
def test_a_received_gradient_norm_falls_by_at_most_a_tenth(kernels: bool) -> None:
    module = _dispatch._KERNELS if kernels else _dispatch._TWINS
    received = torch.tensor([[1.0, 1.0, 100.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]], device=DEVICE)
    present = torch.tensor([1, 1, 1, 0, 1], dtype=torch.int32, device=DEVICE)
    norms = torch.tensor([[1.125, 64.0, 64.0, 64.0, 0.0], [64.0] * 5], device=DEVICE)
    module.norms.commit_norms(received, present, norms, inverse_world=1.0)
    expected = torch.tensor([[1.0, 64.0 * 0.9**2, 100.0, 64.0, 1.0], [2.0, 2.0, 2.0, 64.0, 2.0]], device=DEVICE)
    torch.testing.assert_close(norms, expected)


def test_lars_excludes_vectors_by_two_switches() -> None:
    for switch, moved in (({}, 0.5), ({"exclude_1d_from_decay": False}, 1.0)):
        bias = nn.Parameter(torch.ones(8))
        optimizer = LARS([bias], lr=0.5, momentum=0.0, weight_decay=1.0, **switch)
        bias.grad = torch.ones(8)
        optimizer.step()
        torch.testing.assert_close(bias.detach(), torch.full((8,), 1.0 - moved))
    bias = nn.Parameter(torch.ones(8))
    optimizer = LARS([{"params": [bias], "exclude_1d_from_trust": False}], lr=1.0, momentum=0.0, trust_coefficient=0.1)
    bias.grad = torch.full((8,), 7.0)
    optimizer.step()
    torch.testing.assert_close(bias.detach(), torch.full((8,), 0.9))


def test_choices_changed_in_a_param_group() -> None:
    """A new compressor is taken in by zero_grad(), keeps the states, and is never silently ignored."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, compressor=TopK(0.5, scope="tensor"))
    train(model, optimizer, 2)
    before = int(optimizer.metrics()["nnz"])
    kept = optimizer.state[model[6].weight]["residual"].clone()
    optimizer.param_groups[0]["compressor"] = TopK(0.01)
    optimizer.zero_grad()
    assert torch.equal(optimizer.state[model[6].weight]["residual"], kept)
    train(model, optimizer, 1)
    assert int(optimizer.metrics()["nnz"]) < before / 40
    optimizer.param_groups[0]["memory"] = Residual()
    with pytest.raises(RuntimeError, match="compressor, memory or decay of group 0 was changed"):
        (loss_of(model, 0, 0).backward(), optimizer.step())
    train(model, optimizer, 2)  # its zero_grad() takes the change in
    assert "momentum_buffer" in optimizer.state[model[6].weight]


@pytest.mark.parametrize(
    "memory", [MomentumCorrection(), Residual(), NoMemory()], ids=["correction", "residual", "none"]
)
def test_the_fronts_run_on_kernels_too(memory: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole front on interpreted kernels gives the twins' bits."""
    results = []
    for chosen in ("reference", "kernels"):
        monkeypatch.setenv("FUSEDCOMP_OPS", chosen)
        model = net()
        optimizer = SGD(
            model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3, memory=memory,
            compressor=TopK(0.01, warmup_steps=2, scope="tensor"),
        )  # fmt: skip
        train(model, optimizer, 4)
        results.append(digest(model))
    assert results[0] == results[1]


def test_an_unknown_choice_of_ops_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCOMP_OPS", "fast")
    with pytest.raises(ValueError, match="FUSEDCOMP_OPS"):
        SGD(net().parameters(), lr=0.1)


def test_the_repr_tells_what_is_compressed_and_how() -> None:
    settings = {"state_dtype": torch.bfloat16, "overlap": False, "bucket_cap_mb": 7.0}
    text = repr(SGD(net().parameters(), lr=0.1, compressor=TopK(0.001, scope="tensor"), **settings))
    assert [f"{name}: {value}" in text for name, value in settings.items()] == [True] * 3
    assert "TopK(density=0.001" in text
    assert "scope='tensor'" in text
    assert fusedcomp.__version__


@pytest.mark.parametrize("kind", [SGD, LARS])
@pytest.mark.parametrize("compressor", [TopK(0.01), TopK(1.0), Identity()], ids=["topk", "all", "identity"])
@pytest.mark.parametrize("memory", [MomentumCorrection(), Residual()], ids=["correction", "residual"])
def test_the_default_dtype_changes_nothing(kind: type[SGD], compressor: object, memory: object) -> None:
    """Buffers are fp32 because they say so, whatever torch makes of a tensor that does not."""
    results = []
    for default in (torch.float32, torch.float64):
        model, half = net(), nn.Linear(64, 64).bfloat16()
        nn.init.constant_(half.weight, 0.5)
        loss_of(model, 0, 0).backward()
        half.weight.grad = torch.full_like(half.weight, 0.25)
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            optimizer = kind(
                [{"params": model.parameters()}, {"params": half.weight, "momentum": 0.0}],
                lr=0.05, momentum=0.9, weight_decay=1e-3, compressor=compressor, memory=memory,
            )  # fmt: skip
            optimizer.step()
            metrics = {name: (value.dtype, value.tolist()) for name, value in optimizer.metrics().items()}
        finally:
            torch.set_default_dtype(before)
        results.append((digest(model), half.weight.tolist(), metrics))
    assert results[0] == results[1]


def test_what_was_not_finite_stays_counted_when_buckets_are_planned_anew() -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = SGD([weight], lr=0.1, momentum=0.9, compressor=TopK(0.1))
    weight.grad = torch.full((64, 64), float("nan"))
    optimizer.step()
    optimizer.param_groups[0]["compressor"] = TopK(0.2)
    optimizer.zero_grad()
    assert int(optimizer.metrics()["nonfinite"]) == 1
