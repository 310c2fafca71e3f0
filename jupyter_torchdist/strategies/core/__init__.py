"""What every strategy builds on: its context, cutting and joining batches, random numbers, sharded tensors, weights."""
