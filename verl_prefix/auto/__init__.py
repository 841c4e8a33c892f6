"""The cheapest path: costs of passes, and the choice that `plan` and the engine share."""
