#!/usr/bin/env bash
# The GPU grid of `verl-prefix bench`, on a bare machine with torch and transformers, nothing installed, and where verl
# is, whole engines through `verl-prefix ab`. In two calls of ten minutes; a third goes on where the second stopped:
#
#   VERL_PREFIX_COMMIT=$(git rev-parse HEAD) OUT=DIR examples/bench_gpu.sh
#
# Rows that are measured are in outputs/bench_gpu/*.json, after every row, and are not measured again. At the end of
# each call, the JSON files go to OUT, if that is set; `verl-prefix bench --render FILE` makes Markdown and PNG of one.
# On a fresh machine put them back there first, and name the same commit. By the FLOPs of its rows at 400 TFLOP/s all of
# it takes 430 s, start-up and the capacity search aside (not yet tried on a GPU).
#
#   VERL_PREFIX_COMMIT   the clean commit that these files are, where no .git came along
#   LIMIT                seconds of one call; 560 by default
#   JOBS                 names of the jobs below to run; all by default
#   DRY_RUN=1            tiny model and rows on a CPU: the script itself is tried
#   PYTHONPATH           may name a folder with the package prefix_grouper, for that arm, and with verl, for ab
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
RESULTS=${RESULTS:-outputs/bench_gpu}
LIMIT=${LIMIT:-560}
for folder in "$RESULTS" ${OUT:+"$OUT"}; do
    if ! { mkdir -p "$folder" && [ -w "$folder" ]; } 2> /dev/null; then
        echo "$folder cannot be written: set RESULTS and OUT to folders that can be made, or written to" >&2
        exit 2
    fi
done
failed=0

wanted() {  # NAME: asked for, not done, and with time left for it
    left=$((LIMIT - SECONDS))
    [[ " ${JOBS:-$1} " == *" $1 "* && ! -e $RESULTS/$1.done ]] && ((left > 20))
}

finished() {  # NAME EXIT_CODE
    case $2 in
        0) touch "$RESULTS/$1.done" ;;
        124) echo "== $1: out of time; run this again" ;;
        *) failed=1 ;;
    esac
}

job() {  # NAME ARGUMENTS...: one JSON file; the most important jobs come first
    local name=$1 arguments=() word
    shift
    wanted "$name" || return 0
    for word in "$@"; do
        if [[ -n ${DRY_RUN:-} ]]; then
            case $word in
                */*/*) word=$(awk -F/ '{ print int($1 / 256) + 1 FS int($2 / 256) + 1 FS int($3 / 8) + 1 }' <<<"$word") ;;
                qwen* | llama*) word=tiny ;;
                6 | 8) word=2 ;; # tiny has two layers
                float32) word=float64 ;;
                48) word=0.04 ;;
                musique | video | gsm8k | verl4368) word=tiny ;;
            esac
        fi
        arguments+=("$word")
    done
    [[ -n ${DRY_RUN:-} ]] && arguments+=(--device cpu --threads 1 --no-memory)
    [[ -z ${DRY_RUN:-} && -n $(git rev-parse HEAD 2>/dev/null)${VERL_PREFIX_COMMIT:-} ]] || arguments+=(--allow-dirty)
    echo "== $name, $left s left: ${arguments[*]}"
    timeout "$left" "${PYTHON:-python3}" -m verl_prefix.cli bench "${arguments[@]}" --out "$RESULTS/$name.json"
    finished "$name" $?
}

replay() {  # NAME SHAPE LAYERS P,S,G,N: verl's engine and ours on made-up rows, each with its optimizer
    local name=$1 model=$RESULTS/$1.model
    [[ -z ${DRY_RUN:-} ]] || set -- "$1" tiny 2 24,8,2,1
    wanted "$name" || return 0
    if ! "${PYTHON:-python3}" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("verl") is None)'; then
        echo "== $name: left out, verl is not installed"
        return 0
    fi
    echo "== $name, $left s left: $*"
    "${PYTHON:-python3}" -c "import torch; from verl_prefix.tools.bench.options import build_model
build_model('$2', $3, 'cpu', torch.float32).save_pretrained('$model')" &&
        timeout "$left" "${PYTHON:-python3}" -m verl_prefix.cli ab --synthetic "$4" --model "$model" \
            --arms packed,phased --truth-steps 1 --force --out "$RESULTS/$name"
    finished "$name" $?
    rm -rf "$model"
    [[ ! -e $RESULTS/$name/report.json ]] || cp "$RESULTS/$name/report.json" "$RESULTS/$name.json"
}

ALL=stock,prefix_grouper,packed,phased,auto,phased+offload
FEW=stock,packed,phased
job paper      --shape qwen3-8b --layers 6 --repeats 2 --truth none --arms $ALL \
               --rows 10240/2048/8 10240/2048/32
job small      --shape qwen3-8b --layers 6 --repeats 2 --truth float32 \
               --arms stock_lean,$ALL,stock+checkpoint,phased+checkpoint --grid musique --grid video --grid gsm8k
job compiled   --shape qwen3-8b --layers 6 --repeats 1 --truth none --arms stock,phased --compile --rows 10240/2048/32
job capacity   --shape qwen3-8b --layers 8 --repeats 1 --truth none --arms stock,phased --rows 10240/2048/2 --capacity 48
job llama      --shape llama3-8b --layers 6 --repeats 1 --truth none --arms $FEW --rows 10240/2048/8 10240/2048/32
job verl4368   --shape qwen3-4b --layers 6 --repeats 2 --truth float32 --arms $FEW --grid verl4368
job splits     --shape qwen3-8b --layers 6 --repeats 1 --truth none --arms $FEW --rows 6144/6144/8 2048/10240/8
replay verl    qwen3-0.6b 28 2401,256,8,1
job dualkv     --shape qwen3-8b --layers 6 --repeats 1 --truth none --arms $FEW --rows 4096/512/28 16384/512/28

[[ -z ${OUT:-} ]] || cp "$RESULTS"/*.json "$OUT"
exit $failed
