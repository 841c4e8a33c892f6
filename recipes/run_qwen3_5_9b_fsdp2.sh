#!/usr/bin/env bash
# GRPO | Qwen3.5-9B, three of four layers recurrent | a recipe's data | FSDP2 training, vLLM rollout | 8 GPUs
#
#   bash recipes/run_qwen3_5_9b_fsdp2.sh musique|video_rlvr [what the recipe's script takes]
#
# The recipe's own script, with its knobs, and another model.

set -xeuo pipefail

case "${1:-}" in
    musique) SCRIPT=musique/run_qwen3_8b_fsdp2.sh ;;
    video_rlvr) SCRIPT=video_rlvr/run_qwen2_5_vl_7b_fsdp2.sh ;;
    *)
        echo "Unsupported recipe '${1:-}'. Expected 'musique' or 'video_rlvr'." >&2
        exit 1
        ;;
esac

export MODEL_ENGINE=${MODEL_ENGINE:-prefix}
export MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3.5-9B}
export MODEL_NAME=${MODEL_NAME:-qwen3_5_9b}
export IMAGE_PATCH_SIZE=${IMAGE_PATCH_SIZE:-16}
export TOOL_FORMAT=${TOOL_FORMAT:-qwen3_coder}

# When it thinks, its prompt opens <think>, and no response has the whole block that the clips' reward looks for. The
# other recipe's script has this option itself.
NO_THINKING=()
[[ "$1" != video_rlvr ]] || NO_THINKING=(+data.apply_chat_template_kwargs.enable_thinking=False)

# Without flash-linear-attention verl's own actor lets a row's state leak into the row packed behind it (README.md): one
# row per micro-batch is slow, and right. Ours sees to it by itself.
ROW_BY_ROW=()
HAS_FLA='from transformers.utils import import_utils; raise SystemExit(not import_utils.is_flash_linear_attention_available())'
if [[ "${MODEL_ENGINE}" == dp ]] && ! python3 -c "${HAS_FLA}" 2>/dev/null; then
    if [[ "$1:${SEARCH:-False}" == musique:turns ]]; then
        echo "Unsupported SEARCH=turns with MODEL_ENGINE=dp: verl takes no mini-batch of so many rows" \
            "with a micro-batch per row. Install flash-linear-attention, or set MODEL_ENGINE=prefix." >&2
        exit 1
    fi
    ROW_BY_ROW=(
        actor_rollout_ref.actor.use_dynamic_bsz=False
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
        actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=False
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1
        actor_rollout_ref.ref.log_prob_use_dynamic_bsz=False
        actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1
    )
fi

ARGS=("${@:2}") PRESET=()
if [[ "${2:-}" == --preset ]]; then
    PRESET=("${ARGS[@]:0:2}") ARGS=("${ARGS[@]:2}")
fi
bash "$(dirname "${BASH_SOURCE[0]}")/${SCRIPT}" "${PRESET[@]}" "${NO_THINKING[@]}" "${ROW_BY_ROW[@]}" "${ARGS[@]}"
