"""Running and measuring: configuration, recipes, the loop, checkpoints, metrics."""
