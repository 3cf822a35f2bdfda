"""`dflow-train doctor`: is this environment fit, and does a recipe compute what it should."""
