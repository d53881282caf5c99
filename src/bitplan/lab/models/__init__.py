"""The few models that bitplan's experiments need, in plain torch; each module is one family."""
