"""`dflow-train export` and `validate-export`: write the folder that engines load, and prove it."""
