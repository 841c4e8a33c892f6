"""A file per engine of verl: what only that engine knows, behind `engine.backend.Backend`.

`fsdp` is verl's FSDP2 engine (`model_engine=prefix`), `stock_path` what verl's own path of a Hugging Face model needs
to be right. Everything else of a mini-batch is the engine room's (`verl_prefix.engine`).
"""
