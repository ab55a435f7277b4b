PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# `make demo` installs what it needs alone, unless what the tests need is installed, which has that
DEMO := $(if $(wildcard $(STAMP)),$(STAMP),$(patsubst %,%.demo,$(dir $(STAMP))))
EXTRA = $(if $(filter %.demo,$@),demo,test)
DOCS := .venv/.docs
CASES := 10000
SEED := 0
SEEDS := seeds
TORCH := oldest
MARKS := not slow and not gpu
TESTS := -m "$(MARKS)"

.DEFAULT_GOAL := help
.PHONY: help install constraints demo test suite test-slow test-gpu versions lint fuzz kernels ray pages docs zoo parallel-table matrix seeds formats methods bench clean

help:  ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

install: $(STAMP)  ## make .venv and install fxplug with all that its tests need

$(sort $(STAMP) $(DEMO)): setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -e '.[$(EXTRA)]' -c constraints.txt || { \
		echo "the versions in constraints.txt cannot be had here: installing the newest that can"; \
		$(BIN)/python -m pip install -e '.[$(EXTRA)]'; }
	touch $@

constraints:  ## write constraints.txt anew, with the newest release of everything that is not torch's
	.ci/constraints constraints.txt
	.ci/constraints .ci/oldest.txt oldest

demo: export HF_HUB_OFFLINE = 1
demo: $(DEMO)  ## rewrite the quickstart model, then run examples/quickstart.py
	$(BIN)/fxplug rewrite configs/quickstart.yaml --out out/quickstart
	$(BIN)/python examples/quickstart.py

lint: install  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy fxplug

test: install  ## lint, and beside it all tests but the slow and the GPU ones; MARKS="not gpu" runs the slow ones too
	@$(MAKE) --no-print-directory --jobs=2 lint suite

suite: export HF_HUB_OFFLINE = 1
suite: export PYTHONDONTWRITEBYTECODE =
suite: install
	@command -v chromedriver > /dev/null || echo "tests in a browser are skipped: apt-get install chromium chromium-driver"
	@command -v node > /dev/null || echo "the test of the site's search is skipped: apt-get install nodejs"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "$(MARKS)" --durations=25

test-slow:  ## the tests that take minutes
	@$(MAKE) --no-print-directory suite MARKS="slow and not gpu"

test-gpu: export HF_HUB_OFFLINE = 1
test-gpu: install  ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu

versions: export HF_HUB_OFFLINE = 1
versions:  ## run TESTS on TORCH=oldest (the oldest of everything), or on TORCH=2.14.1, in an environment of its own
	OMP_NUM_THREADS=1 .ci/versions $(TORCH) -n auto --dist worksteal $(TESTS)

fuzz: export HF_HUB_OFFLINE = 1
fuzz: install  ## attack readers, tracer, switches, forms, plans and exports with CASES=10000 random cases each, from SEED=0 on
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py --cases $(CASES) --seed $(SEED)

kernels: export OMP_NUM_THREADS = 1
kernels: install  ## prove the Triton kernels without a GPU: values, what they compile to, and programs of torch.compile
	TRITON_INTERPRET=1 $(BIN)/python -W ignore tests/kernels_interpreted.py
	$(BIN)/python -W ignore tests/kernels_in_programs.py
	$(BIN)/python -W ignore tests/kernels_compiled.py
	$(BIN)/python -W ignore tests/kernels_compiled.py broken

ray: export HF_HUB_OFFLINE = 1
ray: install  ## install fxplug[ray] (250 MB), and test replicas on two nodes of Ray on this machine
	$(BIN)/python -m pip install -e '.[ray]' -c constraints.txt || $(BIN)/python -m pip install -e '.[ray]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_replicas.py

pages: export HF_HUB_OFFLINE = 1
pages: install  ## write what the code says of itself below docs/reference (passes, verbs, keys) and docs/families (recipes, memory)
	$(BIN)/fxplug passes --pages docs/reference/passes
	$(BIN)/python .ci/reference.py docs/reference
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python .ci/families.py docs/families

docs: $(DOCS)  ## build the documentation into out/docs: open out/docs/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file .ci/mkdocs.yml

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install -e '.[docs]' -c constraints.txt || $(BIN)/python -m pip install -e '.[docs]'
	touch $@

zoo: install  ## trace the model zoo and print what is exact
	$(BIN)/python benchmarks/exactness.py

parallel-table: export HF_HUB_OFFLINE = 1
parallel-table: install  ## print xDiT's table of models and parallel ways, each cell checked against one process
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/parallel_table.py --keep out/parallel_table.jsonl

matrix: export HF_HUB_OFFLINE = 1
matrix: install  ## run every two features on a model of each family, beside an oracle, and write docs/matrix.md
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/matrix.py --keep out/matrix.jsonl --page docs/matrix.md \
		--json out/matrix.json

seeds: install  ## hold the files and plugins of HCP-Diffusion, EveryDream2trainer and ZhiJian in SEEDS=folder to their own code
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python benchmarks/seeds.py $(SEEDS)

formats: export HF_HUB_OFFLINE = 1
formats: install  ## print which adapter files are read and how exactly, beside PEFT and LyCORIS, and write docs/reference/adapter_files.md
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/formats.py --write

methods: export HF_HUB_OFFLINE = 1
methods: install  ## measure time, memory, quality and drift of each method on the Fashion model, on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/methods.py --json benchmarks/results/$(shell date +%F)-cpu-methods.json

bench: install  ## measure tracing, ControlNet in one graph, training steps, and adapters at run time
	$(BIN)/python benchmarks/trace.py
	$(BIN)/python benchmarks/controlnet.py
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/train_loop.py
	$(BIN)/python benchmarks/recompiles.py
	$(BIN)/python benchmarks/forms.py --fit --write
	$(BIN)/python benchmarks/unmerged.py
	$(BIN)/python benchmarks/mixed.py
	$(BIN)/python benchmarks/switching.py
	$(BIN)/python benchmarks/compile_time.py
	$(BIN)/python benchmarks/step_cache.py
	$(BIN)/python benchmarks/hoist.py

clean:  ## remove what the targets above made, except .venv
	rm -rf build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
