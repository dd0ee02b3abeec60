# One command per job; each makes the environment it needs, and remakes it when the pins change.
PYTHON ?= python3
PYTEST_ARGS ?=
SKIP_TRITON36 ?=

.PHONY: demo docs test lint test-triton36

demo: .venv/.installed
	.venv/bin/python -m fusedcomp demo

# Into site/. tests/test_docs.py builds it too.
docs: .venv/.installed
	.venv/bin/mkdocs build --strict

# pytest comes last, so that its summary closes the output.
test: lint $(if $(filter 1,$(SKIP_TRITON36)),,test-triton36)
	.venv/bin/python -m pytest -m "not gpu" $(PYTEST_ARGS)

lint: .venv/.installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# Every kernel compiles under the oldest supported triton too, which cannot share an environment with the pinned one.
# For one GPU: what differs between them the pinned one shows, and a lane takes two minutes for each.
test-triton36: .venv36/.installed
	.venv36/bin/python -m pytest tests/test_aot_compile.py -k sm_90

.venv/.installed: constraints.txt
.venv36/.installed: constraints-gpu-triton.txt

%/.installed: pyproject.toml
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install -c $(filter %.txt,$^) -e '.[dev]'
	touch $@

.NOTPARALLEL:
