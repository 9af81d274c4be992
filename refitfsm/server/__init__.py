"""What runs inside the SGLang server's process. It needs nothing but torch."""

LOADER = "refitfsm.server.loader.load"
"""What a server's `--custom-weight-loader` has to say."""
