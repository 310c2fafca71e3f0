"""The processes of a node: agent, warm processes, launcher. Standard library alone, and torch in two of them."""
