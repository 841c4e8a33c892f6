"""The self-check: a few rows on both paths."""
