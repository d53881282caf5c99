"""Pictures and pages that bitplan writes: self-contained files, no network, and only what their data says."""
