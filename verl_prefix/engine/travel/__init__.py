"""Rows travel to the rank that computes their group, and outputs travel back."""
