"""The exported drafter inside serving engines."""
