"""Training with DeepSpeed's engine."""
