"""What a rank writes while it runs: output, metrics, displays."""
