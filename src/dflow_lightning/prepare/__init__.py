"""`dflow-train prepare`: let the target answer prompts, and write tokens to train on."""
