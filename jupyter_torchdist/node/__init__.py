"""The processes of a node: agent, zygotes, launcher. The agent needs only the standard library."""
