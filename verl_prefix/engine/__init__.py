"""verl's worker side, the same for every engine of verl: rows in, each prompt computed once, outputs back.

Read `prefix_engine` first. A mini-batch goes, in the order of `PrefixEngine.forward_backward_batch`, through

    rows          what is derived from verl's batch: lengths, keys, padding, the budget of a pass
    paths         is this batch one for verl's own path, whatever its lengths? Then the backend computes it so
    exchange      rows travel to the rank that computes their group, where `grouping` makes groups of them (`row_table`:
                  what ranks know of all rows before; `travel`: who sends which rows where; `row_bytes`: what is sent)
    paths         groups become a plan of passes, or go verl's own path, as where sharing does not pay
    verify        where a check is due, a few rows first take both paths, by `self_check`
    mini_batch    `core.schedule` runs the plan; of each pass `outputs` makes log-probs and entropy from logits, as
                  verl's rows, and `loss` the loss
    exchange      outputs travel back to where the rows came from
    step_metrics  what all ranks and mini-batches of a step did becomes the step's metrics

`backend` says what is asked of one engine of verl; `verl_prefix.backends` answers. Every rank reaches every collective:
one with fewer passes runs dummies, and one without outputs sends nothing. Errors in the exchange and in the
checks of rows reach all ranks by `together`; any other leaves them waiting until their collectives time out.

Apart from that: `headroom` and `out_of_memory` (memory of an update), `carried_pixels` (one of a prompt's rows carried
the pixels from the rollout on; the others get them back).
"""
