# `make demo` and `make test` do all the set-up on a fresh machine: .venv and its packages, in the checkout alone.
# PYTHON names the interpreter to build .venv from; the default is the first suitable one.
PYTHON ?= $(shell for python in python3 python3.12 python3.11 python3.10; do \
	$$python -c 'import ensurepip, sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	&& { echo $$python; break; }; done)
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test lint gpu venv clean

venv: $(VENV)/.installed

# torch comes first and exactly: with an open range pip may fetch several releases of several GB each.
$(VENV)/.installed: constraints.txt setup.cfg pyproject.toml
	@test -x $(RUN) || test -n "$(PYTHON)" || { \
	echo "no Python 3.10-3.12 that can make a venv (Debian: apt install python3-venv); say make PYTHON=..." >&2; exit 2; }
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(RUN) -m pip install -q -c constraints.txt -e '.[dev,mpi]'
	touch $@

lint: venv
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# What the machine lacks (Slurm, MPI, a GPU) is skipped, and the summary says why. Long tests are .ci/run's. The
# tests of a file run in one process, for their ranks.
test: lint
	$(RUN) -m pytest -n 2 --dist loadfile -m "not long"

demo: venv
	$(RUN) examples/demo.py

# Nothing is installed here: the machine's own Python, unless .venv is there. `make gpu GPU="--site PACKAGES --quick"`
gpu:
	$(firstword $(wildcard $(RUN)) $(PYTHON) python3) -m bench.gpu $(GPU)

clean:
	rm -rf $(VENV) runs
