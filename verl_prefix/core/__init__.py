"""THE IDEA: a group's prefix is computed once, forward and backward. Start at `schedule`."""
