"""The common base of all strategies: context, cutting and joining batches, random numbers, sharded tensors, weights."""
