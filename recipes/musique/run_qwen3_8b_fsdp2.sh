#!/usr/bin/env bash
# GRPO | Qwen3-8B | MuSiQue, all paragraphs in the prompt | FSDP2 training, vLLM rollout | 8 GPUs
#
# MODEL_ENGINE controls the actor: prefix (shared prefix, verl_prefix) or dp (verl's own). Apart from it, only the
# placement of rows on ranks differs between the two. SEARCH is for what `prepare.py --search` wrote: the model searches
# the paragraphs in several turns, and SEARCH=True appends them in one row (verl's tool agent), SEARCH=turns makes a row
# of each (search_turns.py).

set -xeuo pipefail

# ---- user-adjustable ----
MODEL_ENGINE=${MODEL_ENGINE:-prefix}
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
MODEL_NAME=${MODEL_NAME:-qwen3_8b}
DATA_DIR=${DATA_DIR:-$HOME/data/musique}
TRAIN_FILE=${TRAIN_FILE:-$DATA_DIR/train.parquet}
VAL_FILE=${VAL_FILE:-$DATA_DIR/val.parquet}
NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}

TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-128}
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-64}
SEARCH=${SEARCH:-False}
MAX_TURNS=${MAX_TURNS:-5}
# verl's parser of the model's tool calls. Qwen3.5: qwen3_coder.
TOOL_FORMAT=${TOOL_FORMAT:-hermes}
# A prompt's and a response's most tokens. With SEARCH=True the response has all turns and what the tool found; with turns
# the prompt has the longest history, and the response one turn, whose thoughts no history has.
case "${SEARCH}" in
    False) LENGTHS=(4096 512) THINKING=False LOOP=single_turn_agent SUFFIX= ;;
    True) LENGTHS=(1024 4096) THINKING=False LOOP=tool_agent SUFFIX=_search ;;
    turns) LENGTHS=(6144 1024) THINKING=True LOOP=search_turns SUFFIX=_search_turns ;;
    *)
        echo "Unsupported SEARCH=${SEARCH}. Expected 'False', 'True' or 'turns'." >&2
        exit 1
        ;;
esac
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-${LENGTHS[0]}}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-${LENGTHS[1]}}
PPO_MAX_TOKEN_LEN_PER_GPU=${PPO_MAX_TOKEN_LEN_PER_GPU:-$((4 * (MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH)))}

ACTOR_LR=${ACTOR_LR:-1e-6}
KL_LOSS_COEF=${KL_LOSS_COEF:-0.001}
ENTROPY_COEFF=${ENTROPY_COEFF:-0}

ROLLOUT_N=${ROLLOUT_N:-8}
ROLLOUT_TP=${ROLLOUT_TP:-2}
ROLLOUT_GPU_MEM_UTIL=${ROLLOUT_GPU_MEM_UTIL:-0.6}

PROJECT_NAME=${PROJECT_NAME:-verl_prefix_musique}
# A name of its own for each kind of run: verl resumes from it, and its file starts anew.
EXPERIMENT_NAME=${EXPERIMENT_NAME:-${MODEL_NAME}_fsdp2_${MODEL_ENGINE}${SUFFIX}}
SAVE_FREQ=${SAVE_FREQ:--1}
TEST_FREQ=${TEST_FREQ:-20}
TOTAL_EPOCHS=${TOTAL_EPOCHS:-1}
# file: PROJECT_NAME/EXPERIMENT_NAME.jsonl under VERL_FILE_LOGGER_ROOT, or here. wandb where it is installed (verl brings
# it) and knows what to do: without a key or a mode its start ends the run.
WANDB=$({ [[ -n "${WANDB_API_KEY:+set}${WANDB_MODE:+set}" ]] || grep -qs 'api\.wandb\.ai' "${HOME}/.netrc"; } &&
    python3 -c 'import wandb' 2>/dev/null && echo ',"wandb"' || true)
LOGGER=${LOGGER:-"[\"console\",\"file\"${WANDB}]"}
# ---- end user-adjustable ----

RECIPE_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

case "${MODEL_ENGINE}" in
    prefix)
        ENGINE=(model_engine=prefix)
        TRAINER_MODE=prefix_sync
        [[ "${SEARCH}" != turns ]] || ENGINE+=(actor_rollout_ref.actor.prefix.mini_batches=prompts)
        ;;
    dp)
        # FSDP2 here too, so that the two runs differ by prefix sharing alone.
        ENGINE=(model_engine=dp actor_rollout_ref.actor.strategy=fsdp2)
        TRAINER_MODE=sync
        # verl's mini-batches count rows: the same number of updates where every session has all its turns.
        [[ "${SEARCH}" != turns ]] || PPO_MINI_BATCH_SIZE=$((PPO_MINI_BATCH_SIZE * MAX_TURNS))
        ;;
    *)
        echo "Unsupported MODEL_ENGINE=${MODEL_ENGINE}. Expected 'prefix' or 'dp'." >&2
        exit 1
        ;;
esac

########################### parameter arrays ###########################

# Qwen3's thinking does not fit into 512 tokens; in a row per turn it has the turn's own.
DATA=(
    data.train_files="${TRAIN_FILE}"
    data.val_files="${VAL_FILE}"
    data.train_batch_size=${TRAIN_BATCH_SIZE}
    data.max_prompt_length=${MAX_PROMPT_LENGTH}
    data.max_response_length=${MAX_RESPONSE_LENGTH}
    data.filter_overlong_prompts=True
    data.truncation=error
    +data.apply_chat_template_kwargs.enable_thinking=${THINKING}
    reward.custom_reward_function.path="${RECIPE_DIR}/reward.py"
    reward.custom_reward_function.name=compute_score
)

MODEL=(
    actor_rollout_ref.model.path="${MODEL_PATH}"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
)

ACTOR=(
    "${ENGINE[@]}"
    actor_rollout_ref.actor.optim.lr=${ACTOR_LR}
    actor_rollout_ref.actor.ppo_mini_batch_size=${PPO_MINI_BATCH_SIZE}
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${PPO_MAX_TOKEN_LEN_PER_GPU}
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=${KL_LOSS_COEF}
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=${ENTROPY_COEFF}
    actor_rollout_ref.actor.fsdp_config.param_offload=False
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
    actor_rollout_ref.actor.fsdp_config.offload_policy=False
)

ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=${ROLLOUT_N}
    actor_rollout_ref.rollout.tensor_model_parallel_size=${ROLLOUT_TP}
    actor_rollout_ref.rollout.gpu_memory_utilization=${ROLLOUT_GPU_MEM_UTIL}
    actor_rollout_ref.rollout.max_model_len=$((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH))
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=${PPO_MAX_TOKEN_LEN_PER_GPU}
)

if [[ "${SEARCH}" != False ]]; then
    # max_tool_response_length counts characters. Ray's workers import from the recipe's folder.
    ROLLOUT+=(
        actor_rollout_ref.rollout.multi_turn.enable=True
        actor_rollout_ref.rollout.multi_turn.format=${TOOL_FORMAT}
        actor_rollout_ref.rollout.multi_turn.max_assistant_turns=${MAX_TURNS}
        actor_rollout_ref.rollout.multi_turn.max_tool_response_length=4096
        actor_rollout_ref.rollout.multi_turn.tool_config_path="${RECIPE_DIR}/search_tool.yaml"
        actor_rollout_ref.rollout.agent.default_agent_loop=${LOOP}
        actor_rollout_ref.rollout.agent.agent_loop_config_path="${RECIPE_DIR}/search_turns.yaml"
        "+ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH='${RECIPE_DIR}${PYTHONPATH:+:$PYTHONPATH}'"
    )
fi
REF=(
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=${PPO_MAX_TOKEN_LEN_PER_GPU}
    actor_rollout_ref.ref.fsdp_config.param_offload=False
)

ALGORITHM=(
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
)

TRAINER=(
    trainer.v1.trainer_mode=${TRAINER_MODE}
    trainer.logger="${LOGGER}"
    trainer.project_name="${PROJECT_NAME}"
    trainer.experiment_name="${EXPERIMENT_NAME}"
    trainer.nnodes=${NNODES}
    trainer.n_gpus_per_node=${NGPUS_PER_NODE}
    trainer.val_before_train=False
    trainer.save_freq=${SAVE_FREQ}
    trainer.test_freq=${TEST_FREQ}
    trainer.total_epochs=${TOTAL_EPOCHS}
)

########################### launch ###########################
python3 -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    "${MODEL[@]}" \
    "${ACTOR[@]}" \
    "${ROLLOUT[@]}" \
    "${REF[@]}" \
    "${ALGORITHM[@]}" \
    "${TRAINER[@]}" \
    "$@"

# What to expect. The script's options compose in verl 0.9.1 (tests/recipes); no number of a GPU run is claimed here.
#   step 1                prefix/reuse_fraction, prefix/tokens_saved, prefix/groups, prefix/split_groups in the log:
#                         split_groups is 0, and a reuse_fraction of 0 means that nothing is shared
#   dp against prefix     the same losses and rewards within noise; compare timing_s/update_actor, timing_s/old_log_prob
#                         and timing_s/ref; the rollout is vLLM's in both and has its own prefix cache
#   SEARCH=turns          prefix/tree_depth is over 1; sessions/overlong/mean over 0: raise MAX_PROMPT_LENGTH
#   reward                critic/score/mean rises first with the share of well-formed <answer> blocks, then with F1;
#                         val-core/musique/acc is exact match
#   out of memory         lower PPO_MAX_TOKEN_LEN_PER_GPU; a group that does not fit runs as suffix waves
