"""Shared-prefix GRPO for verl's FSDP actor. Imports neither verl nor ray: Ray may unpickle our classes first."""

__version__ = "0.1.0"
