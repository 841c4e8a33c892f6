"""Options of the prefix actor as verl config dataclasses; `*/*.yaml` are their Hydra side.

`options` has those of a shared prefix, `actor` what actor and engine options of all engines have in common, and
`engines` what is whose, and `fsdp`, `veomni` and `megatron` a file per engine. Everything that cannot work is refused
in the driver, before a worker starts: verl's `validate_config` builds the actor's config and calls `validate` there;
`driver.check_driver` is called where the config is resolved.
"""
