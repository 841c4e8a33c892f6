"""Metrics of passes and of training steps."""
