"""What operations do with the samples of a batch: rules, and the verdict on a loss."""
