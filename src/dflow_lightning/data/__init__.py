"""Conversations in, token batches out. Import the submodule you need; nothing heavy loads here."""
