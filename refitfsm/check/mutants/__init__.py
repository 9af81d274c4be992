"""Rules with one thing changed, made from the rows themselves: each change has to break a law."""
