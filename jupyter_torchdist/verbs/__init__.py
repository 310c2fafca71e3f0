"""What `%dist` and `torchdist` both do: waiting for a job, the verbs, the defaults. Knows no IPython."""
