"""The laboratory: tasks, models, the training loop, comparisons and reports behind the experiments."""
