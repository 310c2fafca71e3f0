"""What this machine has, and which job has which of its GPUs."""
