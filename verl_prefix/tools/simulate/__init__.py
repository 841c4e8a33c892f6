"""Memory, FLOPs and time of an update without a GPU: the real schedule, model and FSDP2 on fake tensors."""
