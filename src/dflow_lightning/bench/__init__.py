"""`dflow-train bench`: tau, acceptance and speed of drafters."""
