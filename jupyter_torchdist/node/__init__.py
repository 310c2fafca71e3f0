"""The processes of a node: agent, warm processes, launcher, and what they watch. Standard library, torch in two of them."""
