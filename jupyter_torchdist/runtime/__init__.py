"""What runs on a node. Node side: agent, relay, zygote, launcher. Rank side: worker and what user code sees."""
