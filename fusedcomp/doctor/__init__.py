"""Is everything there that training needs, and how fast is the network? See docs/doctor.md."""

from fusedcomp.doctor.checks import Check as Check
from fusedcomp.doctor.checks import run_checks as run_checks
from fusedcomp.link import Link as Link
from fusedcomp.link import Rate as Rate
from fusedcomp.link import measure_link as measure_link
