"""The generated pages, each a function from nothing to text."""
