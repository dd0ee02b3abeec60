"""On a GPU: no host synchronisation, stream order, offsets past 2**31; two GPUs: replicas over NCCL."""

import tempfile

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import fusedcomp
from fusedcomp import TopK
from fusedcomp.kernels import compress
from fusedcomp.kernels.apply import apply_payloads
from fusedcomp.kernels.segments import BLOCK, WORDS, Operands, Segments
from gpu_nets import wide_net

pytestmark = pytest.mark.gpu

OPTIMIZERS = {
    "topk": lambda p: fusedcomp.SGD(p, lr=0.01, momentum=0.9, weight_decay=1e-4, compressor=TopK(0.01)),
    "tensor": lambda p: fusedcomp.SGD(p, lr=0.01, momentum=0.9, compressor=TopK(0.01, scope="tensor")),
    "tree": lambda p: fusedcomp.SGD(p, lr=0.01, momentum=0.9, compressor=TopK(0.01, collective="tree")),
    "split": lambda p: fusedcomp.SGD(p, lr=0.01, momentum=0.9, compressor=TopK(0.01, collective="split")),
    "lars": lambda p: fusedcomp.LARS(p, lr=1.0, weight_decay=1e-4, compressor=TopK(0.01)),
    "identity": lambda p: fusedcomp.SGD(p, lr=0.01, momentum=0.9),
    "warmup": lambda p: fusedcomp.SGD(p, lr=0.01, momentum=0.9, compressor=TopK(0.01, warmup_steps=12)),
    "half": lambda p: fusedcomp.SGD(
        p, lr=0.01, momentum=0.9, compressor=TopK(0.01, wire_dtype=torch.bfloat16), state_dtype=torch.bfloat16
    ),
    "residual": lambda p: fusedcomp.SGD(p, lr=0.01, momentum=0.9, compressor=TopK(0.01), memory=fusedcomp.Residual()),
    "guarded": lambda p: fusedcomp.SGD(
        p, lr=0.01, momentum=0.9, compressor=TopK(0.01), max_grad_norm=0.5, clip_scope="bucket", skip_nonfinite=True
    ),
    "random": lambda p: fusedcomp.SGD(p, lr=0.01, momentum=0.9, compressor=fusedcomp.RandomK(0.01)),
    "block": lambda p: fusedcomp.SGD(p, lr=0.01, momentum=0.9, compressor=fusedcomp.BlockTopK(0.01)),
    "block_half": lambda p: fusedcomp.SGD(
        p,
        lr=0.01,
        momentum=0.9,
        compressor=fusedcomp.BlockTopK(0.001, wire_dtype=torch.bfloat16),
        state_dtype=torch.bfloat16,
        skip_nonfinite=True,
    ),
    "block_warmup": lambda p: fusedcomp.SGD(
        p, lr=0.01, momentum=0.9, compressor=fusedcomp.BlockTopK(0.01, warmup_steps=12)
    ),
    "threshold": lambda p: fusedcomp.SGD(
        p, lr=0.01, momentum=0.9, compressor=fusedcomp.Threshold.from_density(0.01), memory=fusedcomp.Residual()
    ),
    "cat": lambda p: fusedcomp.SGD(p, lr=0.01, momentum=0.9, compressor=fusedcomp.CAT(fusedcomp.PacketCost())),
    "cat_quantized": lambda p: fusedcomp.SGD(
        p, lr=0.01, momentum=0.9, compressor=fusedcomp.CAT(fusedcomp.PacketCost(), variant="sparse_quantized")
    ),
    "cat_stochastic": lambda p: fusedcomp.SGD(
        p, lr=0.01, momentum=0.9, compressor=fusedcomp.CAT(fusedcomp.PacketCost(), variant="stochastic")
    ),
    "clipped": lambda p: fusedcomp.SGD(p, lr=0.01, momentum=0.9, compressor=TopK(0.01), max_grad_norm=0.5),
}


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer):
    inputs, targets = torch.randn(64, 512, device="cuda"), torch.randint(10, (64,), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_host_sync(name: str) -> None:
    """No synchronising call and no pageable copy in 20 steps: by the runtime and by the profiler."""
    model = wide_net()
    optimizer = OPTIMIZERS[name](model.parameters())
    step = make_step(model, optimizer)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as trace:
            for _ in range(20):
                step()
                optimizer.metrics()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    events = {event.key for event in trace.key_averages()}
    waits = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"} & events
    assert not waits, waits
    assert not {event for event in events if "Pageable" in event and "Memcpy" in event}
    assert any("_update_dense_kernel" in event for event in events), "the trace saw no kernel of ours"
    # torch.profiler itself synchronises the device when it stops; a step must not.
    assert sum(e.count for e in trace.key_averages() if e.key == "cudaDeviceSynchronize") <= 2


def stressed(sleep: bool) -> list[torch.Tensor]:
    model = wide_net()
    optimizer = fusedcomp.SGD(model.parameters(), lr=0.01, momentum=0.9, compressor=TopK(0.01), bucket_cap_mb=0.5)
    generator = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(64, 512, device="cuda"), torch.randint(10, (64,), device="cuda")
    other = torch.cuda.Stream()
    for step in range(15):
        stream = other if step % 2 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            if sleep:
                torch.cuda._sleep(int(torch.randint(10**6, (1,), generator=generator)))
                with torch.cuda.stream(optimizer._backward.side):
                    torch.cuda._sleep(int(torch.randint(10**6, (1,), generator=generator)))
            loss.backward()
        torch.cuda.current_stream().wait_stream(stream)
        if sleep:
            torch.cuda._sleep(int(torch.randint(10**6, (1,), generator=generator)))
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_stream_order() -> None:
    """Delays thrown into every stream, backward on a stream of its own in every other step: the same bits."""
    calm = stressed(sleep=False)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(calm, stressed(sleep=True), strict=True))


def trained(captured: bool, name: str, mixed: bool = False) -> list[torch.Tensor]:
    """110 steps with an lr that falls, the last 100 of them plain or as replays of a CUDA graph of the whole step.

    mixed: every third of those is plain, with gradients elsewhere.
    """
    model = wide_net()
    optimizer = OPTIMIZERS[name](model.parameters())
    lr = torch.tensor(0.01, device="cuda")
    for group in optimizer.param_groups:
        group["lr"] = lr
    generator = torch.Generator(device="cuda").manual_seed(3)
    data = torch.randn(110, 64, 512, device="cuda", generator=generator)
    targets = torch.randint(10, (110, 64), device="cuda", generator=generator)
    x, y = data[0].clone(), targets[0].clone()

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    def feed(number: int) -> None:
        x.copy_(data[number])
        y.copy_(targets[number])
        lr.fill_(0.01 * 0.98**number)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for number in range(10):
            feed(number)
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):  # captures, does not run
            step()
    for number in range(10, 110):
        feed(number)
        graph.replay() if captured and not (mixed and number % 3 == 0) else step()
    torch.cuda.synchronize()
    # The device has counted what the host did not see.
    assert optimizer.state_dict()["param_groups"][0]["fusedcomp"]["step"] == 110
    return [p.detach().clone() for p in model.parameters()]


REPLAYED = ["topk", "tensor", "lars", "half", "identity", "residual", "guarded", "clipped", "block", "block_half"]


@pytest.mark.parametrize("name", REPLAYED)
def test_replayed_graph_of_the_whole_step(name: str) -> None:
    """A hundred replays with a changing lr end where a hundred plain steps do, bit for bit."""
    plain, replayed = trained(False, name), trained(True, name)
    assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))
    assert all(torch.isfinite(p).all() for p in plain)


@pytest.mark.parametrize("name", ["topk", "lars", "identity"])
def test_plain_steps_between_replays(name: str) -> None:
    """They use a table of addresses of their own: bit for bit what plain steps alone do."""
    plain, mixed = trained(False, name), trained(True, name, mixed=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, mixed, strict=True))


def test_capture_during_warmup_is_refused() -> None:
    """Its replays would keep the density of the step that was captured."""
    model = wide_net()
    optimizer = OPTIMIZERS["warmup"](model.parameters())
    step = make_step(model, optimizer)
    step()
    with pytest.raises(RuntimeError, match="capture after the warm-up"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        step()


def test_steps_of_one_graph_keep_their_own_addresses() -> None:
    """Gradients of two captured steps lie at different places: a replay finds both."""
    params = [torch.zeros(3000, device="cuda") for _ in range(300)]
    operands = Operands(params)
    sets = [[torch.ones_like(p) for p in params] for _ in range(2)]
    seen = [torch.zeros_like(operands.addresses) for _ in sets]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for grads, addresses in zip(sets, seen, strict=True):
            operands.update(grads)
            addresses.copy_(operands.addresses)
    for _ in range(2):
        graph.replay()
        for grads, addresses in zip(sets, seen, strict=True):
            assert addresses.tolist() == [[g.data_ptr() for g in grads], [p.data_ptr() for p in params]]


def test_offsets_past_2_31() -> None:
    """A parameter of 2**31 + 7 elements: its last element is compressed and applied, the first is left alone."""
    numel, device = 2**31 + 7, torch.device("cuda")
    if torch.cuda.get_device_properties(0).total_memory < 60 << 30:
        pytest.skip("needs 60 GiB")
    segments = Segments.build([numel], device)
    param, grad = torch.zeros(numel, device=device), torch.zeros(numel, device=device)
    grad[-1] = 5.0
    operands = Operands([param])
    operands.update([grad])
    residual = torch.zeros(segments.padded_numel, device=device)
    counts = torch.full((segments.num_blocks,), -7, dtype=torch.int32, device=device)
    marks = torch.full((segments.num_blocks, WORDS), -7, dtype=torch.int32, device=device)
    seed = torch.zeros(1, dtype=torch.int32, device=device)
    least = torch.tensor([1 << 32], device=device)
    compress.compress(
        segments, operands, None, residual, None, least, None, None, seed, None, None, residual, counts, marks, None,
        None, accumulate="residual", grad_scale=1.0, weight_decay=0.0, momentum=0.0,
    )  # fmt: skip
    assert int(counts.sum()) == int(counts[-1]) == 1
    assert int(marks.count_nonzero()) == 1
    assert int(marks[-1, 0]) == 1 << (numel - 1) % BLOCK
    assert float(residual[numel - 1]) == 5.0
    starts = torch.zeros((1, segments.num_pages + 1), dtype=torch.int32, device=device)
    starts[0, -1] = 1
    indices = torch.full((1, 1), (numel - 1) % 65536, dtype=torch.int16, device=device)
    values, lr = torch.full((1, 1), 2.0, device=device), torch.ones(1, device=device)
    apply_payloads(segments, operands, starts, indices, values, lr, None, seed, None, seed, None, inverse_world=1.0)
    assert float(param[-1]) == -2.0
    assert int(param.count_nonzero()) == 1


def nccl_rank(rank: int, world: int, folder: str) -> None:
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    results = {}
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(rank)
        model = wide_net()
        optimizer = make(model.parameters())
        generator = torch.Generator(device="cuda").manual_seed(rank)
        for _ in range(30):
            inputs = torch.randn(64, 512, device="cuda", generator=generator)
            targets = torch.randint(10, (64,), device="cuda", generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        results[name] = [p.detach().cpu() for p in model.parameters()]
    for name in ("topk", "tree", "split"):
        model = wide_net()
        optimizer = OPTIMIZERS[name](model.parameters())
        step = make_step(model, optimizer)
        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(5):
            step()
        torch.cuda.set_sync_debug_mode("default")
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.multigpu
def test_replicas_over_nccl() -> None:
    """Two ranks with different data, overlapped exchange: the same bits on both, and no host sync with NCCL in play."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(nccl_rank, (2, folder), nprocs=2)
        zero, one = (torch.load(f"{folder}/{rank}.pt") for rank in range(2))
    for name in OPTIMIZERS:
        for a, b in zip(zero[name], one[name], strict=True):
            assert torch.equal(a, b), name
            assert torch.isfinite(a).all()
