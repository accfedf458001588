# make demo, make test: everything they need is set up first, in .venv.
#   PYTHON=python3.12      the interpreter that .venv is made with
#   TORCH_INDEX=URL        an index with CPU-only builds of torch, e.g. https://download.pytorch.org/whl/cpu
#                          (spares the CUDA libraries: about 5 of 5.7 GB)
#   PYTEST="-m 'not slow'" words for pytest in make package
#   KERNELS="MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=avx2"  the kernels of make kernels

PYTHON ?= python3
TORCH_INDEX ?=
PYTEST ?=
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
# where bytecode is not kept, every interpreter that a test starts compiles torch anew: most of the tests' time
unexport PYTHONDONTWRITEBYTECODE
# the tests' parallel workers must not fight for the cores
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# products are rounded by other kernels than the processor's own: the oldest, which every x86-64 has
KERNELS ?= MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 OPENBLAS_CORETYPE=Nehalem

.PHONY: demo test quick kernels lint docs package clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(RUN) -m lit_epgan study --config studies/demo.yaml

# three workers for two cores: slow tests wait for processes of their own; with four, those of several ranks take five times as long
test: $(READY)
	$(ONE_THREAD) $(RUN) -m pytest -n 3 --dist worksteal

quick: $(READY)
	$(ONE_THREAD) $(RUN) -m pytest -n 2 -m "not slow"

# the quick tests of the files that solve or decompose matrices, where rounding grows, and compare to eight digits or
# more; and of the file in which other kernels have shown
SOLVES := cholesky|linalg\.(inv|solve|lstsq|eig|svd|slogdet|det)
kernels: $(READY)
	$(KERNELS) $(ONE_THREAD) $(RUN) -m pytest -n 2 -m "not slow" tests/test_inspection_selections.py \
	  $$(grep -lE '$(SOLVES)' tests/test_*.py | xargs grep -lE '1e-(8|9|1[0-9])')

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check --exclude '*.md' .
	$(RUN) -m mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

package:
	PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" .ci/package $(PYTEST)

$(READY): pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(if $(TORCH_INDEX),$(RUN) -m pip install --quiet --index-url $(TORCH_INDEX) torch torchvision)
	$(RUN) -m pip install --quiet --no-compile --editable '.[dev]'  # what is imported is compiled then: a minute less
	touch $@

clean:
	rm -rf $(VENV) *.egg-info build dist site .pytest_cache .mypy_cache .ruff_cache
