"""JointSpar: every step draws the blocks (layers) of which gradients are computed at all.

S  = {d : u_d < p_d}                      drawn before forward; requires_grad is off in the other blocks
g_d <- g_d / p_d  for d in S              E[g] is the whole gradient; no others are computed, applied or kept
p  <- from |g_d|, d in S                  bandit.py: so that the variance of g is least

Gradients are divided, and their norms found, in jointspar_grads.py.
"""

import dataclasses
import math
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fusedcomp.bandit import draw, inclusion
from fusedcomp.collectives import Group
from fusedcomp.jointspar_grads import UNDRAWN, Hooked, Inside
from fusedcomp.jointspar_parts import SAMPLED, Block, Observed, Rules, already, blocks_of
from fusedcomp.optimizer import CompressedOptimizer
from fusedcomp.values import is_number, plain

CHECKPOINT_VERSION = 1


class JointSpar:
    """Draws the active blocks of every step (Liu & Mozafari, ICML 2022); with ``fusedcomp.LARS`` JointSpar-LARS.

    ``draw()`` takes the place of ``optimizer.zero_grad()``. Inactive blocks have requires_grad off until the next draw,
    so that backward does not compute their gradients, and ends where nothing active lies before. Parameters in no
    block are always active. Each block is active with its own probability p, independently; its gradient g counts as
    g / p. Probabilities follow the blocks' gradient norms; the host never waits for those of the last step.

    Args:
        optimizer: any of torch's or fusedcomp's; build it first. Which of its parameters require grad is noted here.
        budget: the expected share of active blocks, in (0, 1]. 1 is a run without JointSpar, bit for bit. At least one
            block's, unless parameters in no block are there to be trained: then a draw may be of none.
        min_probability: the least p of a block, in (0, budget]: gradients are scaled by at most its inverse. None: half
            the budget.
        blocks: modules, or lists of parameters; each is one block. None: every parameter of two or more dimensions
            begins a block, and the vectors that follow it in its param group (bias, norm) belong to it.
        exclude: modules or parameters that are always active, taken out of ``blocks``.
        learning_rate: how fast probabilities follow the norms (alpha), > 0.
        loss: what they follow: ``"gain"``, or ``"shifted"``, the paper's, with far more noise.
        redraw_every: ``draw()`` keeps the active blocks for so many steps, and learns from the last of them.
        sampling: ``"shared"``, the same blocks on all ranks, or ``"per_rank"``, as published: every rank has its own
            probabilities and draws. That needs a fusedcomp optimizer.
        lag: redraws for which norms may be on their way to the host. 0 waits for the device in every one.
        process_group: the ranks that share draws and norms. None: the optimizer's, the default group, or this process.
        seed: of the draws. Equal on all ranks; ``"per_rank"`` tells them apart.

    Raises:
        ValueError: an argument is out of range, a parameter is in two blocks, of another sampler, or not the
            optimizer's, or arguments differ between ranks.
        TypeError: an argument of another type.
        NotImplementedError: blocks on several devices, or of sharded parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        budget: float,
        min_probability: float | None = None,
        *,
        blocks: Sequence[Block] | None = None,
        exclude: Sequence[nn.Module | Tensor] = (),
        learning_rate: float = 0.1,
        loss: str = "gain",
        redraw_every: int = 1,
        sampling: str = "shared",
        lag: int = 1,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        self._group = _group_of(optimizer, process_group)
        with self._group.refusing():
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(f"JointSpar: optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
            if isinstance(optimizer, torch.optim.LBFGS):
                raise TypeError(
                    "JointSpar: optimizer must leave parameters without a gradient alone, got LBFGS, which moves all"
                )
            floor = plain(budget) / 2 if min_probability is None and is_number(budget) else min_probability
            self._rules = Rules(budget, floor, learning_rate, loss, redraw_every, sampling, lag, seed)
            self._blocks = blocks_of(optimizer, blocks, exclude)
            known = {param for block in self._blocks for param in block}
            params = [p for group in optimizer.param_groups for p in group["params"]]
            self._always = [p for p in params if p not in known and p.numel() > 0]
            self._rules.check_blocks(len(self._blocks), self._may_be_empty)
            compressed = isinstance(optimizer, CompressedOptimizer)
            if isinstance(optimizer, CompressedOptimizer) and optimizer._sampler is not None:
                raise ValueError(
                    "JointSpar: the optimizer has a sampler already; remove() that one, or give it all blocks"
                )
            if sampling == "per_rank" and self._group.world_size > 1 and not compressed:
                raise ValueError(
                    "JointSpar: sampling='per_rank' needs a fusedcomp optimizer: with others gradients are means over "
                    "ranks by the time of step(), and the norms of this rank's own are not known"
                )
        self.optimizer = optimizer
        self._params = [param for block in self._blocks for param in block]
        device = self._params[0].device
        self._group.agree(self._fingerprint(), device)
        self._bandit = self._rules.bandit(len(self._blocks))
        self._draws = 0
        self._active = [True] * len(self._blocks)
        self._inclusion = [1.0] * len(self._blocks)
        self._pending: deque[Observed] = deque()
        self._drawn = False  # since the last step
        self._unheard = False  # were norms of a step drawn for, but not looked at yet?
        self._gradients: Inside | Hooked | None = None  # where all are computed there is nothing to do
        if self._rules.budget < 1.0:
            if isinstance(optimizer, CompressedOptimizer):
                self._gradients = Inside(optimizer, self._blocks, self, sampling == "shared")
            else:
                self._gradients = Hooked(self._blocks)
        SAMPLED.update(dict.fromkeys(self._params, True))
        handle = optimizer.register_step_post_hook(_weakly(self, JointSpar._observe))
        self._release = weakref.finalize(self, _release, handle, self._params, self._gradients)
        self._release.atexit = False

    def _fingerprint(self) -> dict[str, str]:
        """What must be equal on all ranks."""
        fields = {name: repr(value) for name, value in dataclasses.asdict(self._rules).items()}
        shapes = {f"block {i}": str([tuple(p.shape) for p in block]) for i, block in enumerate(self._blocks)}
        return fields | {"number of blocks": str(len(self._blocks))} | shapes

    # ---- a step ------------------------------------------------------------------------------------------------

    def draw(self) -> None:
        """Draw the active blocks of the next step, before its forward; all gradients become None.

        Once per optimizer step, however many backward passes accumulate in it; again before the same step, they stay.

        Raises:
            RuntimeError: between ``backward()`` and ``step()`` of a fusedcomp optimizer that has sent gradients; a
                parameter of an active block does not require grad any more; or the sampler was removed.
        """
        self._refuse_if_launched("draw()")
        if not self._release.alive:
            raise RuntimeError(
                "this JointSpar was removed: build a new one, or go on with optimizer.zero_grad() in place of draw()"
            )
        self._refuse_frozen()
        if not self._drawn:
            self._advance()
        self.optimizer.zero_grad()  # a fusedcomp optimizer also counts here which gradients to wait for
        self._tell()

    def _advance(self) -> None:
        """The active blocks of one more step."""
        if self._draws % self._rules.redraw_every == 0:
            while len(self._pending) > self._rules.lag:
                seen = self._pending.popleft()
                self._bandit.update(seen.square_norms(self._blocks), seen.inclusion)
            place = self._group.rank if self._rules.sampling == "per_rank" else "all"
            rng = random.Random(f"{self._rules.seed}/{place}/{self._draws}")
            self._activate(draw(self._bandit.probabilities, rng, self._may_be_empty))
        self._draws += 1
        self._drawn = self._unheard = True

    def _tell(self) -> None:
        if self._gradients is not None:
            self._gradients.draw(self._inclusion, self._active, self._is_learned_from)

    @property
    def _is_learned_from(self) -> bool:
        """Is this the last step of its active set?"""
        return self._draws % self._rules.redraw_every == 0

    @property
    def _may_be_empty(self) -> bool:
        """Has backward something to do where no block is active?"""
        return any(param.requires_grad for param in self._always)

    def _refuse_if_launched(self, what: str) -> None:
        if isinstance(self.optimizer, CompressedOptimizer):
            self.optimizer._refuse_if_launched(what)

    def _refuse_frozen(self) -> None:
        for index, (block, active) in enumerate(zip(self._blocks, self._active, strict=True)):
            frozen = next((param for param in block if active and not param.requires_grad), None)
            if frozen is not None:
                raise RuntimeError(
                    f"requires_grad of a parameter of shape {tuple(frozen.shape)} in block {index} was switched off "
                    "since the last draw(), which would switch it on again: remove() the sampler, freeze, and build it "
                    "anew"
                )

    def _activate(self, active: Sequence[bool]) -> None:
        self._active = list(active)
        self._inclusion = inclusion(self._bandit.probabilities, self._may_be_empty)
        for block, on in zip(self._blocks, active, strict=True):
            for param in block:
                if param.requires_grad != on:  # to look costs a tenth of setting it
                    param.requires_grad_(on)

    def admit(self) -> None:
        """For a fusedcomp optimizer: fail the step if it was not drawn for."""
        if not self._drawn and isinstance(self.optimizer, CompressedOptimizer):
            self._advance()  # peers may have drawn: what they are sent, if nothing but zeros, has the size they know
            self._tell()
            self.optimizer.fail(UNDRAWN)

    def end(self) -> None:
        """For a fusedcomp optimizer: the step is over, on all ranks, however it went."""
        self._drawn = False

    @torch.no_grad()
    def _observe(self) -> None:
        """The hook after ``step()``: the norms of its gradients start on their way to the host."""
        if not self._unheard:
            return
        self._drawn = self._unheard = False
        if self._gradients is not None:
            self._gradients.end()
            if self._is_learned_from:
                host, ready = self._send(self._gradients.square_norms().view(1, -1))
                self._pending.append(Observed(self._active, self._inclusion, host, ready))

    def _send(self, own: Tensor) -> tuple[Tensor, Callable[[], Any]]:
        """Those of all ranks that share them, (ranks, params), on the host once the returned function has waited."""
        everyone, work = own, None
        if self._rules.sampling == "shared" and self._group.world_size > 1:
            # Not summed on the way: the host adds up in one order, so that all ranks get the same bits.
            everyone = own.new_empty(self._group.world_size, own.numel())
            work = self._group.all_gather(everyone, own.view(-1))
        if own.device.type != "cuda":
            return everyone, work.wait if work is not None else already
        if work is not None:
            work.wait()  # the stream, not the host
        host = torch.empty_like(everyone, device="cpu", pin_memory=True)
        host.copy_(everyone, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(own.device))
        return host, event.synchronize

    def remove(self) -> None:
        """End it: all blocks are active for good, and gradients unscaled. Call it where ``draw()`` could be.

        A sampler that is dropped does so too, but for ``optimizer.zero_grad()``.

        Raises:
            RuntimeError: between ``backward()`` and ``step()`` of a fusedcomp optimizer that has sent gradients.
        """
        self._refuse_if_launched("remove()")
        self._release()
        self.optimizer.zero_grad()

    # ---- what is known of it -----------------------------------------------------------------------------------

    @property
    def blocks(self) -> list[list[Tensor]]:
        """The parameters of every block."""
        return [list(block) for block in self._blocks]

    def metrics(self) -> dict[str, Tensor]:
        """What was drawn last, as tensors on the host; asks the device for nothing.

        - ``probabilities``: of every block, float64
        - ``active``: of every block, bool
        - ``num_active``: how many are active
        - ``active_share``: of the bytes of all gradients those that are computed in this step
        - ``expected_share``: its expectation over draws
        """
        return {
            "probabilities": torch.tensor(self._bandit.probabilities, dtype=torch.float64),
            "active": torch.tensor(self._active),
            "num_active": torch.tensor(sum(self._active)),
            "active_share": self._share_of_bytes([float(active) for active in self._active]),
            "expected_share": self._share_of_bytes(inclusion(self._bandit.probabilities, self._may_be_empty)),
        }

    def _share_of_bytes(self, chances: Sequence[float]) -> Tensor:
        sizes = [sum(param.nbytes for param in block) for block in self._blocks]
        known = set(self._params)
        always = sum(
            p.nbytes for group in self.optimizer.param_groups for p in group["params"]
            if p not in known and p.requires_grad
        )  # fmt: skip
        computed = always + math.fsum(size * chance for size, chance in zip(sizes, chances, strict=True))
        return torch.tensor(computed / (always + sum(sizes)), dtype=torch.float64)

    def __repr__(self) -> str:
        fields = {"blocks": len(self._blocks), **dataclasses.asdict(self._rules)}
        return f"JointSpar({', '.join(f'{name}={value!r}' for name, value in fields.items())})"

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors, between ``step()`` and ``draw()``; waits for norms that are on their way.

        With shared sampling equal on all ranks; per rank, every rank saves its own.
        """
        return {
            "version": CHECKPOINT_VERSION,
            "rules": dataclasses.asdict(self._rules),
            "draws": self._draws,
            "probabilities": torch.tensor(self._bandit.probabilities, dtype=torch.float64),
            "bound": self._bandit.bound,
            "active": list(self._active),
            "pending": [seen.state_dict() for seen in self._pending],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict()`` was taken, with the same draws. Rules are this sampler's, not the file's.

        Raises:
            ValueError: the state of a sampler with other blocks, budget or min_probability, or of a version this one
                does not know. Nothing has been loaded then.
        """
        version = state_dict.get("version")
        if version != CHECKPOINT_VERSION:
            raise ValueError(f"the sampler's checkpoint has version {version}, this JointSpar {CHECKPOINT_VERSION}")
        probabilities = state_dict["probabilities"].tolist()
        if len(probabilities) != len(self._blocks):
            raise ValueError(f"the sampler's checkpoint has {len(probabilities)} blocks, this one {len(self._blocks)}")
        for name in ("budget", "min_probability"):
            saved, mine = state_dict["rules"][name], getattr(self._rules, name)
            if saved != mine:
                raise ValueError(
                    f"the sampler's checkpoint has {name}={saved}, this one {mine}; build it alike, or start anew"
                )
        self._draws, self._drawn = state_dict["draws"], False
        self._bandit.probabilities, self._bandit.bound = probabilities, state_dict["bound"]
        self._pending = deque(Observed.load(seen) for seen in state_dict["pending"])
        self._activate(state_dict["active"])


def _group_of(optimizer: Any, process_group: dist.ProcessGroup | None) -> Group:
    if process_group is None and isinstance(optimizer, CompressedOptimizer):
        return optimizer._group
    return Group(process_group)


def _release(handle: Any, params: Iterable[Tensor], gradients: Inside | Hooked | None) -> None:
    """Leave parameters and optimizer as they were before a sampler."""
    handle.remove()
    if gradients is not None:
        gradients.release()
    for param in params:
        param.requires_grad_(True)
        SAMPLED.pop(param, None)


def _weakly(owner: Any, method: Callable[[Any], None]) -> Callable[..., None]:
    """A hook that does not keep its owner alive."""
    weak = weakref.ref(owner)

    def hook(*_: Any) -> None:
        owner = weak()
        if owner is not None:
            method(owner)

    return hook
