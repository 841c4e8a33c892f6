"""THE IDEA: a group's prefix is computed once, forward and backward. README.md says in which order to read."""
