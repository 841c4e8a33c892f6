"""`verl-prefix plan`: what sharing the prefix would do to a training command."""
