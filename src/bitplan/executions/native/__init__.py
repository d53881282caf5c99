"""Products on the machine's own low-precision units (execution ``native``)."""
