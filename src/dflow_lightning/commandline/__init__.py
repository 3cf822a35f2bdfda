"""Arguments of tools, and recipes with their bases."""
