"""The frozen target, the drafters and what moves rejected rows: everything with parameters."""
