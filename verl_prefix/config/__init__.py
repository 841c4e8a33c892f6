"""Options of the prefix actor as verl config dataclasses; `*/*.yaml` are their Hydra side.

`options` has those of a shared prefix, `actor` what actor and engine options of all engines have in common, and
`engines` what is whose. `fsdp`, `veomni` and `megatron` are a file per engine, with `transformer_fields` for the last.
`model` checks the model, `driver` the whole config.

The driver checks these, before a worker starts: verl's `validate_config` builds the actor's config and calls `validate`
there; `driver.check_driver` is called where the config is resolved. Workers check what needs the built model or a
checkpoint.
"""
