"""One parallelism a file, and how a model becomes plain again."""
