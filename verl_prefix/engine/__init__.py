"""verl's worker side: the FSDP2 engine that computes a group's prefix once. Read `prefix_engine` first.

Where a row goes, in the order of `PrefixFSDPEngine.forward_backward_batch`:

    paths         is this batch one for verl's own path, whatever its lengths? Then `stock_path` computes it
    exchange      rows travel to the rank that computes their group; `row_table`: what ranks know of all rows before,
                  `row_bytes`: what travels
    rows          rows with the same key (uid, prompt, pixels) become a group, rows of turns a tree
    paths         groups become a plan of passes, or go verl's own path, as where sharing does not pay
    verify        where a check is due, a few rows first take both paths, by `self_check`
    mini_batch    `core.schedule` runs the plan; of each pass `outputs` makes log-probs and entropy from logits, as
                  verl's rows, and `loss` the loss
    exchange      outputs travel back to where the rows came from
    step_metrics  what all ranks and mini-batches of a step did becomes the step's metrics

Apart from that: `room` and `out_of_memory` (memory of an update), `trace` and `trace_writer` (recording),
`shared_pixels` (one of a prompt's rows carries the pixels, from rollout on), `carried_pixels` (the others get them
back), `protocol` (what helpers see of the engine).
"""
