"""What to train: one readable file per task, and the parts they are made of."""
