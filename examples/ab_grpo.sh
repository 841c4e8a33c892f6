#!/usr/bin/env bash
# A/B against the stock actor on MuSiQue-format questions, in one of three ways:
#
#   examples/ab_grpo.sh plan     say what sharing the prefix would gain, without training
#   examples/ab_grpo.sh trace    train once, record every optimizer step, replay the steps through both engines
#   examples/ab_grpo.sh runs     train twice, model_engine the one override that differs, and overlay the metrics
#
# Any further words are Hydra overrides of the training runs. Without a GPU it trains on the CPU.

set -euo pipefail

# ---- user-adjustable ----
MODEL=${MODEL:-tiny}                     # tiny, smollm2 (`make demo` installs it), or a model's folder
DATA=${DATA:-}                           # MuSiQue JSON lines; empty: questions of our own
OUT=${OUT:-outputs/ab_grpo}
NGPUS=${NGPUS:-2}                        # ranks
STEPS=${STEPS:-5}                        # training steps
PROMPTS=${PROMPTS:-4}                    # prompts per training step
MINI_BATCH=${MINI_BATCH:-}               # prompts per optimizer step; empty: 2, so that half are off-policy; runs: all
ROLLOUTS=${ROLLOUTS:-4}
MICRO_BATCH=${MICRO_BATCH:-2}            # rows of a micro-batch; packed passes hold as many tokens as these
PARAGRAPHS=${PARAGRAPHS:-3}
RESPONSE=${RESPONSE:-16}
LR=${LR:-1e-4}
AB_ARGS=${AB_ARGS:---arms packed,phased,stock_repacked}
# ---- end user-adjustable ----

MODE=${1:-}
shift || true
case "$MODE" in plan | trace | runs) ;; *) echo "first word '$MODE': write plan, trace or runs" >&2; exit 2 ;; esac
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
if ! { mkdir -p "$OUT" && [ -w "$OUT" ]; } 2> /dev/null; then
    echo "OUT=$OUT cannot be written: set OUT to a folder that can be made, or written to" >&2
    exit 2
fi
OUT=$(cd "$OUT" && pwd)
if [ -z "$MINI_BATCH" ]; then
    MINI_BATCH=2
    if [ "$MODE" = runs ]; then MINI_BATCH=$PROMPTS; fi  # one update: its metrics can be compared
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0
PLATFORM=()
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    export VERL_PLATFORM=cpu OMP_WAIT_POLICY=passive
    PLATFORM=(+platform=cpu +ray_kwargs.ray_init.address=local)
fi

########################### data and model ###########################
# What it does goes to stderr: the last command may print JSON.
echo "ab_grpo: questions and model in $OUT" >&2
if [ -z "$DATA" ]; then
    DATA=$OUT/questions.jsonl
    "$PYTHON" "$ROOT/recipes/musique/make_questions.py" --output "$DATA" --num 64 --seed 1 > "$OUT/prepare.log"
fi
"$PYTHON" "$ROOT/recipes/musique/prepare.py" --input "$DATA" --output "$OUT/data" --max-paragraphs "$PARAGRAPHS" \
    --val-size 4 >> "$OUT/prepare.log"

# A random model never answers: the share of letters in what it writes differs within a group.
REWARD=(reward.custom_reward_function.path=pkg://verl_prefix.testing reward.custom_reward_function.name=letter_share)
if [ "$MODEL" = tiny ]; then
    MODEL=$OUT/model
    "$PYTHON" -c 'import pathlib, sys; from transformers.utils.logging import disable_progress_bar
from verl_prefix.testing import write_tiny_model as write
disable_progress_bar()
write(sys.argv[1], texts=pathlib.Path(sys.argv[2]).read_text().splitlines(), vocab_size=2048)' "$MODEL" "$DATA"
else
    REWARD=(reward.custom_reward_function.path="$ROOT/recipes/musique/reward.py"
            reward.custom_reward_function.name=compute_score)
    if [ "$MODEL" = smollm2 ]; then MODEL=$ROOT/outputs/models/smollm2-135m; fi
    if [ -d "$MODEL" ]; then MODEL=$(cd "$MODEL" && pwd); fi  # what follows runs in ROOT
fi

########################### training ###########################
OVERRIDES=(
    "${PLATFORM[@]}"
    trainer.v1.trainer_mode=prefix_sync
    algorithm.adv_estimator=grpo
    data.train_files="$OUT/data/train.parquet"
    data.val_files="$OUT/data/val.parquet"
    data.train_batch_size="$PROMPTS"
    data.max_prompt_length=3072
    data.max_response_length="$RESPONSE"
    data.filter_overlong_prompts=true
    data.shuffle=false
    data.dataloader_num_workers=0
    data.seed=7
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.model.enable_gradient_checkpointing=false
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH"
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="$MICRO_BATCH"
    actor_rollout_ref.actor.optim.lr="$LR"
    actor_rollout_ref.actor.use_kl_loss=true
    actor_rollout_ref.actor.entropy_coeff=0.001
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu="$MICRO_BATCH"
    actor_rollout_ref.rollout.n="$ROLLOUTS"
    actor_rollout_ref.rollout.seed=7
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu="$MICRO_BATCH"
    "${REWARD[@]}"
    trainer.n_gpus_per_node="$NGPUS"
    "trainer.logger=[console,file]"
    trainer.total_training_steps="$STEPS"
    trainer.total_epochs=1000
    trainer.val_before_train=false
    trainer.test_freq=-1
    trainer.save_freq=-1
    trainer.resume_mode=disable
    "$@"
)

# train NAME OVERRIDES... -> $OUT/NAME.log, $OUT/NAME.jsonl
train() {
    local name=$1
    shift
    echo "ab_grpo: $STEPS steps with $1; log: $OUT/$name.log" >&2
    VERL_FILE_LOGGER_PATH=$OUT/$name.jsonl "$PYTHON" -m verl.trainer.main_ppo "${OVERRIDES[@]}" \
        hydra.run.dir="$OUT/hydra/$name" "$@" > "$OUT/$name.log" 2>&1 ||
        { tail -n 30 "$OUT/$name.log" >&2; echo "training failed: $OUT/$name.log" >&2; exit 1; }
}

cd "$ROOT"
case "$MODE" in
    plan)
        # shellcheck disable=SC2086  # PLAN_ARGS is a list of words
        exec "$PYTHON" -m verl_prefix.cli plan ${PLAN_ARGS:-} "${OVERRIDES[@]}"
        ;;
    trace)
        train recorded model_engine=prefix actor_rollout_ref.actor.prefix.trace_dir="$OUT/trace"
        # shellcheck disable=SC2086
        echo "ab_grpo: $STEPS steps are recorded, and replayed through both engines: $AB_ARGS" >&2
        exec "$PYTHON" -m verl_prefix.cli ab --trace "$OUT/trace" --out "$OUT/report" $AB_ARGS
        ;;
    runs)
        train stock model_engine=dp
        train prefix model_engine=prefix
        exec "$PYTHON" -m verl_prefix.cli ab --runs "$OUT/stock.jsonl" "$OUT/prefix.jsonl" --out "$OUT/report"
        ;;
esac
