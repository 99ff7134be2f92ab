#!/usr/bin/env bash
# What is to be measured on a GPU, in one command:
#   (a) speed of paper-95m at P = 1 and 32 against a plain training loop, (b) peak memory against `brx plan`,
#   (c) pipedream and basis-rotation trained at P = 1 and 32 on the same tokens: curves and slowdown.
# Tables and figures go to results/gpu (--out). No piece takes more than ten minutes; what is done is not done again, so
# that after an interruption the same command goes on where it was.
#
#   benchmarks/gpu_suite.sh [--out DIR] [--source SOURCE] [--iterations N] [--one-piece] [--tiny]
#
#   --source      of the tokens (default: openwebtext; without a network, for example: packages)
#   --iterations  of each training (default: 4000, about half an hour for all four on one H100)
#   --one-piece   do the next piece, and say what is left (exit code 3 while anything is)
#   --tiny        the same in small: seconds per piece, on any machine
set -euo pipefail

out=results/gpu source=openwebtext iterations=4000 one_piece=false tiny=false
while (($#)); do
    case $1 in
        --out) out=$2; shift ;;
        --source) source=$2; shift ;;
        --iterations) iterations=$2; shift ;;
        --one-piece) one_piece=true ;;
        --tiny) tiny=true ;;
        *) echo "gpu_suite.sh: unknown option $1" >&2; exit 2 ;;
    esac
    shift
done

root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python}
runs=$out/runs
piece_seconds=540
config=paper-95m deep=32
# Tokens enough for one epoch, and a validation set that does not matter in time.
settings=("data.source=$source" "data.tokens=$((iterations * 8 * 512))" data.max_epochs=1.03)
speed=()
if [[ $source != openwebtext ]]; then  # a corpus of its own size, read more than once if need be
    settings=("data.source=$source" data.tokens=null data.sample_fraction=1.0 data.max_epochs=1000)
fi
if $tiny; then
    config=quick deep=4 iterations=20
    settings+=(data.tokenizer=bytes "data.directory=$out/data" model.blocks=4 model.width=16 model.sequence_length=16
        runtime.precision=bf16 training.batch_size=2 training.validation_examples=4 data.validation_fraction=0.3)
    speed=(--rounds 1 --iterations 10)
fi
settings+=("training.iterations=$iterations" "training.validation_every=$((iterations / 4))"
    "training.checkpoint_every=$((iterations / 4))" training.keep_checkpoints=1)

finished() { grep -qs '"status": "finished"' "$runs/$1-p$2/summary.json"; }

train() {  # METHOD P: until it is finished or its time is up; Ctrl-C, which `timeout` sends, saves a checkpoint
    local status=0
    timeout --signal=INT --kill-after=60 "$piece_seconds" "$python" -m brx train "$config" --out "$runs/$1-p$2" \
        --resume --set "${settings[@]}" "optimizer.method=$1" "pipeline.stages=$2" || status=$?
    [[ $status == 0 || $status == 124 || $status == 130 ]] || exit "$status"
}

next_piece() {  # does it; fails when there is none left
    if [[ ! -f $out/speed.json ]]; then
        "$python" -m benchmarks.gpu_speed "$config" --stages 1 $deep --out "$out" "${speed[@]}" \
            --only "pipedream, P" "basis-rotation, P" --set "${settings[@]}"
    elif [[ ! -f $out/memory.json ]]; then
        "$python" -m benchmarks.memory "$config" --stages 1 $deep --out "$out" --set "${settings[@]}"
    else
        for stages in 1 $deep; do
            for method in pipedream basis-rotation; do
                if ! finished $method $stages; then
                    train $method $stages
                    return 0
                fi
            done
        done
        [[ ! -f $out/training.json ]] || return 1
        "$python" -m benchmarks.gpu_report "$runs"/*-p1 "$runs"/*-p$deep --out "$out"
    fi
}

left() {
    for table in speed memory training; do [[ -f $out/$table.json ]] || echo -n " $table"; done
}

mkdir -p "$out"
while [[ -n $(left) ]]; do
    next_piece
    if $one_piece; then
        [[ -z $(left) ]] || { echo "left to do:$(left)"; exit 3; }
    fi
done
echo "done: $out/speed.md, $out/memory.md, $out/training.md, $out/curves.png"
