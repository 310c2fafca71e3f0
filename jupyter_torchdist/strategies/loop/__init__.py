"""Training loops: data loaders, analysis of the first steps, and where steps end."""
