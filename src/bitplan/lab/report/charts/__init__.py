"""The charts of an experiment, as plotly figures that also stand alone in a notebook."""
