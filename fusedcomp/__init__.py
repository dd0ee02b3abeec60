"""fusedcomp: data-parallel training with compressed gradients, as drop-in torch optimizers."""

from fusedcomp import ddp as ddp
from fusedcomp.amp import GradScaler as GradScaler
from fusedcomp.compressors import CAT as CAT
from fusedcomp.compressors import BlockTopK as BlockTopK
from fusedcomp.compressors import Identity as Identity
from fusedcomp.compressors import RandomK as RandomK
from fusedcomp.compressors import Threshold as Threshold
from fusedcomp.compressors import TopK as TopK
from fusedcomp.costs import AffineCost as AffineCost
from fusedcomp.costs import LinkCost as LinkCost
from fusedcomp.costs import PacketCost as PacketCost
from fusedcomp.jointspar import JointSpar as JointSpar
from fusedcomp.memories import MomentumCorrection as MomentumCorrection
from fusedcomp.memories import NoMemory as NoMemory
from fusedcomp.memories import Residual as Residual
from fusedcomp.modules import broadcast_buffers as broadcast_buffers
from fusedcomp.optim import LARS as LARS
from fusedcomp.optim import SGD as SGD

__version__ = "0.1.0"
__all__ = [
    "CAT",
    "LARS",
    "SGD",
    "AffineCost",
    "BlockTopK",
    "GradScaler",
    "Identity",
    "JointSpar",
    "LinkCost",
    "MomentumCorrection",
    "NoMemory",
    "PacketCost",
    "RandomK",
    "Residual",
    "Threshold",
    "TopK",
    "broadcast_buffers",
    "ddp",
]
