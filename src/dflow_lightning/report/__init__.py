"""`dflow-train report`: results as one page."""
