"""`dflow-train plan`: memory, work and hours before any GPU time."""
