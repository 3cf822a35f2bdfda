"""`dflow-train sweep`: recipes times seeds."""
