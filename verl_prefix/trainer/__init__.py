"""verl's driver side: the trainer that keeps groups whole on ranks and in mini-batches."""
