"""One kind of parallelism in each file, and how a model becomes an ordinary module again."""
