"""The models of bitplan's experiments, in plain torch; one module per family."""
