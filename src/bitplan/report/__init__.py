"""Pictures and pages that bitplan writes: self-contained files, no network, no foreign code."""
