"""verl's worker side: the FSDP2 engine that computes a group's prefix once. Start at `prefix_engine`."""
