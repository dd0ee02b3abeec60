"""Every kernel compiles for two GPUs, in all the ways the product launches it, without spills and at full width."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]


@pytest.fixture(scope="module", params=[80, 90], ids="sm_{}".format)
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/aot.py found; in a process of its own, since this one may have chosen the interpreter."""
    file = tmp_path_factory.mktemp("aot") / "report.json"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, ROOT / "tests" / "aot.py", str(request.param), file],
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    print(result.stdout)
    assert result.returncode == 0, result.stderr
    return json.loads(file.read_text())


@pytest.fixture
def rows(report: dict[str, Any]) -> list[Row]:
    """What compiled; what did not fails ``test_everything_compiles`` alone."""
    return [row for row in report["rows"] if "error" not in row]


def names(rows: list[Row], *figures: str) -> list[str]:
    return [" ".join([row["kernel"], row["label"], *(f"{figure}={row[figure]}" for figure in figures)]) for row in rows]


def test_everything_compiles(report):
    errors = defaultdict(list)  # one message may be of many specialisations
    for row in report["rows"]:
        if "error" in row:
            errors[f"{row['kernel']}: {row['error']}"].append(row["label"])
    assert not errors, "\n".join(f"{error}\nin {labels}" for error, labels in errors.items())


def test_every_kernel_and_every_launcher_has_a_case(report):
    assert {row["kernel"] for row in report["rows"]} == set(report["defined"]["kernels"])
    assert set(report["cases"]) == set(report["defined"]["launchers"])


def test_every_flag_is_compiled_both_ways(report):
    seen = defaultdict(set)
    for row in report["rows"]:
        for name, value in row["constants"].items():
            if isinstance(value, bool):
                seen[row["kernel"], name].add(value)
    assert not [flag for flag, values in seen.items() if values != {False, True}]


def test_nothing_spills(rows):
    assert not names([row for row in rows if row["spills"]], "registers", "spills")


def test_the_pass_leaves_room_for_four_blocks_on_a_multiprocessor(rows):
    # 65536 registers / (4 blocks x 128 threads).
    crowded = [row for row in rows if row["kernel"] == "_compress_kernel" and row["registers"] > 128]
    assert not names(crowded, "registers")


BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def moved(row: Row) -> tuple[int, int]:
    """Bytes of an element that a kernel reads and writes block by block, from its flags."""
    flag = row["constants"]
    if row["kernel"] == "_decay_params_kernel":  # parameters, and their buffer
        return 4 * (1 + flag["HAS_BUFFER"]), 4 * (1 + flag["HAS_BUFFER"])
    element, state = BYTES[flag["ELEMENT"]], 2 if flag.get("HALF") else 4
    if row["kernel"] == "_compress_kernel":
        states = state * (1 + flag["HAS_VELOCITY"])
        gradients = element * (1 + (flag["HAS_DECAY"] or flag["HAS_NORMS"]))
        return gradients + states + 4 * flag["HAS_WEIGHTS"], states + 4 * flag["SEND_ALL"]
    if row["kernel"] == "_pack_dense_kernel":
        return element, 4
    if row["kernel"] == "_gradient_squares_kernel":
        return element, 0
    if row["kernel"] == "_update_dense_kernel":  # gradients are fp32 sums
        return 4 + element + 4 * flag["HAS_MOMENTUM"], element + 4 * flag["HAS_MOMENTUM"]
    assert row["kernel"] == "_block_norms_kernel"
    return 4 + element, 0


WIDE = {"compress", "pack_dense", "update_dense", "decay_params", "block_norms", "gradient_squares"}
WIDE = {f"_{name}_kernel" for name in WIDE}


def test_every_tensor_of_a_full_block_moves_128_bits_at_a_time(rows):
    # Counted, as present is not enough: the states are aligned and stay wide when an address from a table turns narrow.
    narrow = []
    for row in rows:
        if row["kernel"] in WIDE:
            threads = 32 * row["warps"]
            reads, writes = (row["constants"]["BLOCK"] * nbytes // (16 * threads) for nbytes in moved(row))
            if row["wide_loads"] < reads or row["wide_stores"] < writes:
                narrow.append(row)
    assert not names(narrow, "wide_loads", "wide_stores")


def test_states_of_two_halves_move_as_those_of_one(rows):
    one, two = {}, {}
    for row in rows:
        halves = two if row["constants"].get("HAS_PARITY") else one
        key = row["kernel"], row["label"].replace(" parity", "")
        halves[key] = row["wide_loads"], row["wide_stores"]
    pairs = one.keys() & two.keys()
    stateful = {
        "compress", "count_candidates", "take_drawn", "keep_rest", "mask_winners", "cut_payload", "pack_narrow",
    }  # fmt: skip
    assert {kernel for kernel, _ in pairs} == {f"_{name}_kernel" for name in stateful}
    assert not {key: (one[key], two[key]) for key in pairs if one[key] != two[key]}


def test_the_wide_kernels_are_kernels(rows):
    assert {row["kernel"] for row in rows} >= WIDE
