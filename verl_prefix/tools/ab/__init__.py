"""`verl-prefix ab`: the stock engine and ours on the same rows, or two finished runs, compared."""
