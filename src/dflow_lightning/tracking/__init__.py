"""The record of a run: MLflow, its journal, and what is logged there."""
