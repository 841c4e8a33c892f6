"""The steps of `make gpu-smoke`."""
