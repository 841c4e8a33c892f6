"""`verl-prefix bench`: time, memory and gradient error of one actor update and log-prob pass: stock, peers and ours.

    verl-prefix bench --grid cpu --out bench.json                    writes bench.json, bench.md and bench.png
    verl-prefix bench --shape qwen3-8b --layers 6 --grid video       6 of its 36 layers
    verl-prefix bench --rows 192/48/4 --turns 6                      sessions with a row per turn

Needs torch and transformers alone, on CPU or CUDA. An update is forward and backward of the weighted sum of all
response log-probs of one prompt's rows. Every arm on every row of a grid has

- seconds of the update, of its forwards (losses included), and of the log-prob pass (no gradients), in rounds of all
  arms in turn, in one process: `--repeats` of them, more where they are quick.
- MiB that an update adds at its peak to model, gradients and inputs: CUDA's allocations, or RSS in a fresh process.
- the largest relative error of a parameter's gradient; the truth is stock_lean on sdpa in `--truth`, row by row (HF's
  RMSNorm stays fp32).
- FLOPs of what it computes, and MFU where the device's peak is known.

The token budget that all arms respect is twice the row (verl's advice for ppo_max_token_len_per_gpu), on CUDA 16384
(its default) at least. Not measured: optimizer, FSDP on several ranks, ragged responses. Whole engines, verl's against
ours, are measured by `verl-prefix ab`, on such rows with `--synthetic`; whole steps of real runs by `make demo`.

    options   arms, model shapes, sizes       arms      the code of each arm
    measure   rounds, truth, JSON, resuming   memory    peaks, capacity search      report   grids, Markdown, PNG
"""
