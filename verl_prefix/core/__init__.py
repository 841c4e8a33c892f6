"""THE IDEA: a group's prefix is computed once, forward and backward. README.md has its words and the order to read."""
