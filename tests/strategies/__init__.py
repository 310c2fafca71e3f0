"""What runs on the ranks in tests of strategies: models, their training on one device, checks of effects."""
