"""Tools that look at a run, before or after it; nothing of a training run imports them."""
