"""Invariants as properties, on the twins: conservation, momentum without masking, Nesterov, the wire."""

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fusedcomp import MomentumCorrection, Residual, TopK
from fusedcomp.kernels.reference.accumulate import ACCUMULATE
from fusedcomp.kernels.reference.keys import mix32
from fusedcomp.kernels.reference.norms import trust_ratios
from fusedcomp.kernels.segments import Operands, Segments
from fusedcomp.wire import PayloadLayout, dense_is_cheaper
from steppers import sent_by, stepper

shapes = st.tuples(st.integers(1, 70), st.integers(1, 70))
seeds = st.integers(0, 2**31)
scopes = st.sampled_from(["bucket", "tensor"])
wires = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@given(shape=shapes, density=st.floats(1e-3, 1.0), seed=seeds, nesterov=st.booleans(), scope=scopes)
def test_nothing_is_lost_in_a_step(shape, density, seed, nesterov, scope) -> None:
    """fl(residual + update) == sent + kept, bit for bit; an entry is either sent or kept; masked exactly where sent."""
    generator = torch.Generator().manual_seed(seed)
    weight, optimizer, exchange = stepper(shape, TopK(density, scope=scope), MomentumCorrection(), 0.9)
    optimizer.param_groups[0]["nesterov"] = nesterov
    for _ in range(3):
        velocity, residual = exchange.velocity.clone(), exchange.residual.clone()
        weight.grad = torch.randn(shape, generator=generator)
        grad = torch.zeros_like(residual)
        grad[: weight.numel()] = weight.grad.view(-1)
        optimizer.step()
        name = "nesterov" if nesterov else "momentum"
        new_velocity, accumulated = ACCUMULATE[name](grad, velocity, residual, 0.9)
        sent, kept = sent_by(exchange), exchange.residual
        assert torch.equal(sent + kept, accumulated)
        assert not (sent * kept).any()
        assert torch.equal(exchange.velocity, torch.where(sent != 0, torch.zeros(()), new_velocity))
        assert int((sent != 0).sum()) <= exchange.buffers.layout.k


@given(shape=shapes, density=st.floats(1e-2, 0.5), seed=seeds, steps=st.integers(1, 12))
def test_nothing_is_lost_over_a_run(shape, density, seed, steps) -> None:
    """Dyadic data: weight + lr * (all velocities) == lr * residual bit for bit, masking off (DGC invariant 2)."""
    generator = torch.Generator().manual_seed(seed)
    weight, optimizer, _ = stepper(shape, TopK(density), MomentumCorrection(masking=False), 0.5)
    total, velocity = torch.zeros(shape), torch.zeros(shape)
    for _ in range(steps):
        weight.grad = torch.randint(-8, 9, shape, generator=generator).float()
        velocity = velocity * 0.5 + weight.grad
        total += velocity
        optimizer.step()
    residual = optimizer.state[weight]["residual"]
    assert torch.equal(-weight.detach() + residual, total)


@given(shape=shapes, density=st.floats(1e-2, 1.0), seed=seeds)
def test_error_feedback_conserves_gradients(shape, density, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, optimizer, _ = stepper(shape, TopK(density), Residual(), 0.0)
    total = torch.zeros(shape)
    for _ in range(6):
        weight.grad = torch.randint(-8, 9, shape, generator=generator).float()
        total += weight.grad
        optimizer.step()
    assert torch.equal(optimizer.state[weight]["residual"] - weight.detach(), total)


@given(shape=shapes, seed=seeds)
def test_masking_at_density_one_is_plain_sgd(shape, seed) -> None:
    """DGC invariant 3: with everything sent and masked, the sum sent is the sum of gradients."""
    generator = torch.Generator().manual_seed(seed)
    weight, optimizer, _ = stepper(shape, TopK(1.0), MomentumCorrection(), 0.9)
    total = torch.zeros(shape)
    for _ in range(4):
        weight.grad = torch.randint(-8, 9, shape, generator=generator).float()
        total += weight.grad
        optimizer.step()
    assert torch.equal(-weight.detach(), total)


@given(density=st.floats(1e-3, 1.0), seed=seeds)
def test_topk_is_a_contraction(density, seed) -> None:
    """|x - C(x)|^2 <= (1 - k/d) |x|^2, and no kept entry exceeds a sent one."""
    generator = torch.Generator().manual_seed(seed)
    weight, optimizer, exchange = stepper((50, 50), TopK(density), Residual(), 0.0)
    weight.grad = torch.randn(50, 50, generator=generator)
    optimizer.step()
    sent, kept = sent_by(exchange), exchange.residual
    k, d = exchange.buffers.layout.k, weight.numel()
    assert float(kept.double().square().sum()) <= (1 - k / d) * float(weight.grad.double().square().sum()) + 1e-9
    assert float(kept.abs().max()) <= float(sent[sent != 0].abs().min())


@given(density=st.floats(1e-3, 1.0), seed=seeds)
def test_equal_magnitudes_meet_the_bound(density, seed) -> None:
    weight, optimizer, exchange = stepper((50, 50), TopK(density), Residual(), 0.0)
    weight.grad = torch.randn(50, 50, generator=torch.Generator().manual_seed(seed)).sign()
    optimizer.step()
    assert float(exchange.residual.square().sum()) == 2500 - exchange.buffers.layout.k


@given(segments=st.integers(1, 200), pages=st.integers(1, 50), k=st.integers(1, 5000), norms=st.booleans(), wire=wires)
def test_payload_layout(segments, pages, k, norms, wire) -> None:
    """Fields do not overlap, are in order, and add up to the bytes sent."""
    layout = PayloadLayout(segments, pages, k, norms, wire)
    assert layout.nbytes % 16 == 0
    needed = 4 * (4 + -(-segments // 32)) + (8 * segments if norms else 0) + 4 * (pages + 1) + (2 + wire.itemsize) * k
    assert needed <= layout.nbytes < needed + 16
    buffer = torch.zeros(2, layout.nbytes, dtype=torch.uint8)
    payload = layout.views(buffer)
    for number, view in enumerate(payload, 1):
        view.fill_(number)
    for number, view in enumerate(payload, 1):
        assert (view == number).all()
    assert payload.indices.shape == payload.values.shape == (2, k)


@given(payload=st.integers(1, 10**6), raw=st.integers(4, 10**6), world=st.integers(1, 512))
def test_dense_rule(payload, raw, world) -> None:
    """Dense exactly when the gather would move at least what the all-reduce moves, or a payload exceeds raw."""
    gather, reduce = (world - 1) * payload, 2 * (world - 1) / world * raw
    expected = payload >= raw or (world > 1 and gather >= reduce)
    assume(world == 1 or abs(gather - reduce) > 1e-6 * reduce or payload >= raw)
    assert dense_is_cheaper(payload, raw, world) == expected


@given(values=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=200, unique=True))
def test_mix32_is_a_bijection(values) -> None:
    mixed = mix32(torch.tensor(values))
    assert len(mixed.unique()) == len(values)
    assert int(mixed.min()) >= 0
    assert int(mixed.max()) < 2**32


@given(scale=st.floats(0.1, 10.0), seed=seeds)
def test_trust_ratio_scaling(scale, seed) -> None:
    """Without decay: (w -> c w, g -> g / c) multiplies the ratio by c^2; the step is lr * eta * |w| whatever |g|."""
    generator = torch.Generator().manual_seed(seed)
    g2, w2 = torch.rand(2, 3, generator=generator) + 0.1
    ratios = []
    for c in (1.0, scale):
        trust = torch.zeros(3)
        norms = torch.stack([g2 / c**2, w2 * c**2])
        segments, operands = Segments.build([1] * 3, trust.device), Operands([torch.zeros(1)] * 3)
        trust_ratios(
            segments, operands, norms, None, trust, coefficient=0.01, weight_decay=0.0, eps=0.0, fallback=False
        )
        ratios.append(trust)
    torch.testing.assert_close(ratios[1], ratios[0] * scale**2, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(ratios[0] * g2.sqrt(), 0.01 * w2.sqrt(), rtol=1e-5, atol=0.0)
