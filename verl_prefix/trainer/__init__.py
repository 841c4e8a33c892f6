"""verl's driver side: trainers that keep a prompt's rows in one mini-batch."""
