"""A job as a run of MLflow, TensorBoard or Weights & Biases: read from the job's files, by a process of its own."""
