"""Which path is the cheapest: what passes cost, and the choice that `plan` and the engine share."""
