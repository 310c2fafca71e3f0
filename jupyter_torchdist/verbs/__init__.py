"""Code that `%dist` and `torchdist` share: waiting for a job, the verbs, the defaults. Does not import IPython."""
