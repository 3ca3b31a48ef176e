"""Bridges to training frameworks; each module imports its framework only when it is imported itself."""
