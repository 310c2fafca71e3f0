"""Jobs of this node while no driver is connected."""
