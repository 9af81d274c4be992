"""Tests of the simulated SGLang server."""
