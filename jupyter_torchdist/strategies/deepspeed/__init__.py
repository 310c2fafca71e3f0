"""DeepSpeed's engine in place of the other strategies."""
