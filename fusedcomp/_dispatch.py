"""Kernels or twins: CUDA tensors run the Triton kernels, CPU tensors their plain-torch twins. Nothing else chooses.

``FUSEDCOMP_OPS=reference`` or ``kernels`` overrides it (CPU kernels need ``TRITON_INTERPRET=1``): for tests and to see
whether a kernel is at fault.
"""

import os
from types import SimpleNamespace

import torch

from fusedcomp.kernels import (
    apply,
    clip,
    compress,
    decay,
    dense,
    draws,
    headers,
    merge,
    narrow,
    norms,
    pack,
    pieces,
    refine,
    sample,
    shares,
    sidco,
    tune,
    verdict,
)
from fusedcomp.kernels.reference import apply as apply_twin
from fusedcomp.kernels.reference import clip as clip_twin
from fusedcomp.kernels.reference import compress as compress_twin
from fusedcomp.kernels.reference import decay as decay_twin
from fusedcomp.kernels.reference import dense as dense_twin
from fusedcomp.kernels.reference import draws as draws_twin
from fusedcomp.kernels.reference import headers as headers_twin
from fusedcomp.kernels.reference import merge as merge_twin
from fusedcomp.kernels.reference import narrow as narrow_twin
from fusedcomp.kernels.reference import norms as norms_twin
from fusedcomp.kernels.reference import pack as pack_twin
from fusedcomp.kernels.reference import pieces as pieces_twin
from fusedcomp.kernels.reference import refine as refine_twin
from fusedcomp.kernels.reference import sample as sample_twin
from fusedcomp.kernels.reference import shares as shares_twin
from fusedcomp.kernels.reference import sidco as sidco_twin
from fusedcomp.kernels.reference import tune as tune_twin
from fusedcomp.kernels.reference import verdict as verdict_twin

_KERNELS = SimpleNamespace(
    apply=apply,
    clip=clip,
    compress=compress,
    decay=decay,
    dense=dense,
    draws=draws,
    headers=headers,
    merge=merge,
    narrow=narrow,
    norms=norms,
    pack=pack,
    pieces=pieces,
    refine=refine,
    sample=sample,
    shares=shares,
    sidco=sidco,
    tune=tune,
    verdict=verdict,
)
_TWINS = SimpleNamespace(
    apply=apply_twin,
    clip=clip_twin,
    compress=compress_twin,
    decay=decay_twin,
    dense=dense_twin,
    draws=draws_twin,
    headers=headers_twin,
    merge=merge_twin,
    narrow=narrow_twin,
    norms=norms_twin,
    pack=pack_twin,
    pieces=pieces_twin,
    refine=refine_twin,
    sample=sample_twin,
    shares=shares_twin,
    sidco=sidco_twin,
    tune=tune_twin,
    verdict=verdict_twin,
)


def ops(device: torch.device) -> SimpleNamespace:
    """The launcher modules for tensors on ``device``."""
    chosen = os.environ.get("FUSEDCOMP_OPS") or ("kernels" if device.type == "cuda" else "reference")
    if chosen not in ("kernels", "reference"):
        raise ValueError(f"FUSEDCOMP_OPS must be 'kernels' or 'reference', got {chosen!r}")
    return _KERNELS if chosen == "kernels" else _TWINS
