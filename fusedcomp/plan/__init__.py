"""Would compression pay here? Predicted steps of a model on a cluster: see docs/plan.md."""

from fusedcomp.plan.calibration import Calibration as Calibration
from fusedcomp.plan.calibration import Workload as Workload
from fusedcomp.plan.calibration import load as load
from fusedcomp.plan.cost import Cluster as Cluster
from fusedcomp.plan.cost import Method as Method
from fusedcomp.plan.cost import Planner as Planner
from fusedcomp.plan.cost import Prediction as Prediction
