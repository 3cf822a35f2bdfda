"""Profiles are loaded before the tests are collected."""

import effort  # noqa: F401
