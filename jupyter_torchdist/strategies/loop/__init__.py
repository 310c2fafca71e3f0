"""Training loops: data loaders, watched steps, the ends of steps."""
